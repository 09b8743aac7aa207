"""``python -m pensieve`` is the ``pensieve`` command."""

from pensieve.cli import main

main()
