"""Multi-turn replay: the same conversations, at the same times, against several systems. No torch.

``load`` says what is sent and when, ``targets`` what is measured, ``play`` sends it, ``measure`` condenses what came
back, ``presentation`` shows it. ``session`` is one whole replay, ``command`` its command line.

May import: client, core, debug, frames, pensieve, spawn, tokenizer, v1.
"""
