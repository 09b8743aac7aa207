// The same with OpenAI's client for Node:
// OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none node examples/openai_responses.js
const OpenAI = require("openai").default;

async function main() {
  const client = new OpenAI();
  const model = (await client.models.list()).data[0].id;
  const first = await client.responses.create({ model, input: "My name is Ada and I live in Lisbon." });
  const stream = await client.responses.create({
    model, input: "What's my name?", previous_response_id: first.id, stream: true,
  });
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") process.stdout.write(event.delta);
  }
  process.stdout.write("\n");
}

main();
