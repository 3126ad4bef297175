import assert from "node:assert/strict"
import OpenAI from "openai"
import { fails, hello, isCity, limit, longer, question, run, sunny, url } from "./cases.mjs"

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 })
const asked = (model, more) => ({ model, input: hello, max_output_tokens: limit, store: false, ...more })
const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
})
const city = object({ name: { type: "string", maxLength: 40 }, people: { type: "integer", minimum: 0, maximum: 1e9 } })
const weather = { type: "function", name: "get_weather", strict: true, parameters: object({ city: { type: "string" } }) }

async function chat(model) {
  const answer = await client.responses.create(asked(model))
  assert.ok(answer.output_text)
  assert.ok(answer.usage.output_tokens > 0)
}

async function stream(model) {
  const events = client.responses.stream(asked(model))
  let text = ""
  for await (const event of events) if (event.type === "response.output_text.delta") text += event.delta
  assert.ok(text)
  assert.equal((await events.finalResponse()).output_text, text)
}

async function schema(model) {
  const format = { type: "json_schema", name: "city", schema: city, strict: true }
  const answer = await client.responses.parse(asked(model, { text: { format }, max_output_tokens: longer }))
  isCity(answer.output_parsed)
}

async function tool(model) {
  const input = [{ role: "user", content: question }]
  const more = { input, tools: [weather], max_output_tokens: longer }
  const { output } = await client.responses.create(asked(model, more))
  const [call] = output.filter((item) => item.type === "function_call")
  assert.ok(JSON.parse(call.arguments).city)
  input.push(...output, { type: "function_call_output", call_id: call.call_id, output: sunny })
  assert.ok((await client.responses.create(asked(model, more))).output_text.includes(sunny))
}

await run("openai", { chat, stream, schema, tool, error: (model) => fails(() => chat(model)) })
