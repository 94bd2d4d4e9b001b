"""What every storey may use: options, names, settings of commands, progress. It knows neither arrays nor engines."""
