"""``pensieve doctor``: what this machine can do, and what is missing, with the fix.

May import: cli.output, client, errors, extras, gguf, machine, model, options, tokenizer.
"""
