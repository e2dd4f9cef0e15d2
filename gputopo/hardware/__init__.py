"""Tables of hardware: what a link of a given kind carries. Every figure has its source."""
