"""Multi-turn replay: the same conversations, at the same times, against several systems. No torch.

``load`` says what is sent and when, ``targets`` what is measured, ``play`` sends it, ``records`` are what came of it,
``measure`` condenses them, ``presentation`` shows that. ``session`` is one whole replay; ``command`` and
``compare_command`` are the command line.

May import: client, core, debug, frames, lifeline, options.commands, pensieve, spawn, tokenizer, v1.
"""
