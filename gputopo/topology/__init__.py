"""The graph of one machine: nodes, links, path classes and bandwidths, built from facts."""
