"""The transport between hosts: ZeroMQ on TCP, with its access control."""
