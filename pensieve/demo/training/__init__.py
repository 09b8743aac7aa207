"""Makes the demo model from nothing: dialogues, tokenizer, decoder, training, evaluation. Not in the wheel.

May import: demo.
"""
