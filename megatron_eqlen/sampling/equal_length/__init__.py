"""Equal-length pairs from dual-track streams: the paper's sampling."""
