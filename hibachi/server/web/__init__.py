"""Parts of servers that know no engine: exchanges, logs, deadlines, addresses, signals, tenants; a client."""
