"""Multi-turn replay: the same conversations, at the same times, against several systems.

``workload`` reads or makes conversations as lengths, ``shaping`` cuts them to what every target can hold, ``schedule``
says when each turn is due, ``runner`` sends them to a ``Target`` (``crew``: from several processes at once), ``report``
condenses what came back. No torch.
"""
