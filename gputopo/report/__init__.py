"""Reports: what was found, as text for people and as data for programs. They judge nothing."""
