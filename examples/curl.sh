#!/bin/sh
# A response and the next one by hand: OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none sh examples/curl.sh
set -eu
ask() {
  curl -sS --fail-with-body "$OPENAI_BASE_URL/responses" -H "authorization: Bearer $OPENAI_API_KEY" \
    -H 'content-type: application/json' -d "$1"
}
answer=$(ask '{"input": "My name is Ada and I live in Lisbon."}') || { echo "$answer"; exit 1; }
first=$(echo "$answer" | sed 's/.*"id":"\(resp_[^"]*\)".*/\1/')
ask "{\"input\": \"What's my name?\", \"previous_response_id\": \"$first\", \"stream\": true}"
