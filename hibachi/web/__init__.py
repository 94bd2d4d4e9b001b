"""What servers share that knows no engine: exchanges and their log, deadlines, addresses, signals, tenants and keys."""
