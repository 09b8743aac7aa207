"""``pensieve doctor``: what this machine can do, and what is missing, with the fix.

May import: client, errors, extras, machine, model, options, tokenizer.
"""
