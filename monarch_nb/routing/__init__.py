"""Sans-I/O routing: links, ordering, casts, membership. Events in, actions out."""
