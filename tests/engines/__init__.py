"""Real engines through real daemons, for whoever has an environment with one."""
