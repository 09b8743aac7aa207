"""A conversation over HTTP with OpenAI's client: a chain, a stream, a branch, a conversation.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python examples/openai_responses.py
"""

from openai import OpenAI

with OpenAI() as client:
    model = client.models.list().data[0].id

    # Only the new turn travels, and only it is computed. The id is good after a restart of the server, too.
    first = client.responses.create(model=model, input="My name is Ada and I live in Lisbon.")
    second = client.responses.create(model=model, input="What's my name?", previous_response_id=first.id)
    print(second.output_text)
    assert second.usage is not None
    print(
        second.usage.input_tokens_details.cached_tokens, "of", second.usage.input_tokens, "tokens were cached"
    )

    # From any earlier response there may be another way on.
    branch = client.responses.create(
        model=model, input="Where do I live?", previous_response_id=first.id, stream=True
    )
    for event in branch:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print()

    # A conversation keeps its own place.
    conversation = client.conversations.create(metadata={"topic": "dogs"})
    for text in ("My dog is called Rex.", "What's my dog called?"):
        answer = client.responses.create(model=model, input=text, conversation=conversation.id)
    print(answer.output_text)
    client.conversations.delete(conversation.id)
