"""The protocol, sans-I/O: messages in, decisions out. No torch, sockets, threads or clocks (DESIGN 3.2)."""
