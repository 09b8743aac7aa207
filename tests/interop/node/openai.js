// What OpenAI's own client for Node sees: a chain of responses, a stream, a conversation, chat completions.
const OpenAI = require("openai").default;

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: process.argv[3], maxRetries: 0 });

async function main() {
  const model = (await client.models.list()).data[0].id;
  const first = await client.responses.create({ model, input: "hi" });
  const stream = await client.responses.create({
    model, input: "again", previous_response_id: first.id, stream: true,
  });
  const events = [];
  let last = null;
  for await (const event of stream) {
    events.push([event.sequence_number, event.type]);
    if (event.type === "response.completed") last = event.response;
  }
  const fetched = await client.responses.retrieve(last.id);
  const conversation = await client.conversations.create({ metadata: { topic: "foxes" } });
  await client.responses.create({ model, input: "hi", conversation: conversation.id });
  const items = [];
  for await (const item of client.conversations.items.list(conversation.id, { limit: 1 })) items.push(item.role);
  const messages = [{ role: "user", content: "hi" }];
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  let refused = null;
  try {
    await client.responses.retrieve("resp_unknown");
  } catch (error) {
    refused = [error.status, error.constructor.name];
  }
  console.log(JSON.stringify({
    first: first.output_text, second: fetched.output[0].content[0].text, events, items, text, refused,
  }));
}

main();
