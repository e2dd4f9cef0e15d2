"""A machine against a promise (``check``) and against another machine (``diff``)."""
