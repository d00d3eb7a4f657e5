"""Plans measured on this machine by LiteRT, each processor a process of its own."""
