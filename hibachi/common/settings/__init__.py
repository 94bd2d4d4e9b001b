"""Settings of commands: kinds of values, and reading them from flags, the environment and a TOML file."""
