"""What is said in the demo: people, facts and questions with values that training never saw.

May import: nothing else of Pensieve.
"""
