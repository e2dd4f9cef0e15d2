"""Probes: each reads one source through the host and returns typed facts, without opinion."""
