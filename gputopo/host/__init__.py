"""The only door to the machine: every probe reads through a :class:`~gputopo.host.base.Host`."""
