"""Settings of commands: what each takes, and its value from flags, the environment and a TOML file."""
