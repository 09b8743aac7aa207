"""Multi-turn replay: the same conversations, at the same times, against several systems. No torch.

``load`` defines what is sent and when, and ``targets`` the systems under test. ``play`` sends the turns,
``records`` holds the results, ``measure`` condenses them and ``presentation`` shows them. ``session`` is one
whole replay; ``command`` is the command line.

May import: client, core, debug, frames, lifeline, options.commands, pensieve, spawn, tokenizer, v1.
"""
