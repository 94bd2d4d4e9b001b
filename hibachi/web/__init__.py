"""What servers share that knows no engine: exchanges, their log, deadlines, addresses, signals, tenants; a client."""
