"""How processes of other hosts are reached: ZeroMQ on TCP, and who may come in."""
