// Two turns in one session, from a program that knows nothing but the .proto file.
// usage: node client.js HOST:PORT PROTO_FOLDER; prints one JSON object.
"use strict";

const { randomUUID } = require("node:crypto");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [target, protoFolder] = process.argv.slice(2);
const definition = loader.loadSync("pensieve/v1/pensieve.proto", {
  includeDirs: [protoFolder],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true,
});
const { ConversationService } = grpc.loadPackageDefinition(definition).pensieve.v1;
const client = new ConversationService(target, grpc.credentials.createInsecure());

function call(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function streamTurn(session, text) {
  const request = {
    session,
    turn: {
      request_id: randomUUID(),
      input: [{ role: "ROLE_USER", text }],
      sampling: { temperature: 0, max_output_tokens: 64 },
      output: { token_ids: true },
    },
  };
  return new Promise((resolve, reject) => {
    const result = { request_id: request.turn.request_id, events: [], text: "", token_ids: [] };
    const stream = client.StreamTurn(request);
    stream.on("data", (message) => {
      result.events.push(message.event);
      if (message.event === "delta") {
        result.text += message.delta.text;
        result.token_ids.push(...(message.delta.tokens?.ids ?? []));
      } else if (message.event === "completed") {
        result.completed = message.completed;
      }
    });
    stream.on("error", reject);
    stream.on("end", () => resolve(result));
  });
}

async function main() {
  const { session } = await call("CreateSession", {
    request_id: randomUUID(),
    config: { system_prompt: "Be brief." },
    labels: { client: "node" },
  });
  const turns = [];
  for (const text of ["My name is Ada.", "What is my name?"]) {
    turns.push(await streamTurn(session.name, text));
  }
  const { items, revision } = await call("ListItems", { name: session.name, include_tokens: true });
  const missing = await call("GetSession", { name: "sessions/nobody-has-this" }).catch((error) => ({
    code: grpc.status[error.code],
    has_details: error.metadata.get("grpc-status-details-bin").length > 0,
  }));
  console.log(JSON.stringify({ session, turns, items, revision, missing }));
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
