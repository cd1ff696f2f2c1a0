"""The transport between hosts: ZeroMQ on TCP, and who may connect."""
