"""One way to run a service: server, channel, status, health, configuration."""
