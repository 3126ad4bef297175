import assert from "node:assert/strict"
import OpenAI from "openai"
import { fails, hello, isCity, limit, longer, question, run, sunny, url } from "./cases.mjs"

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 })
const messages = [{ role: "user", content: hello }]
const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
})
const city = object({ name: { type: "string", maxLength: 40 }, people: { type: "integer", minimum: 0, maximum: 1e9 } })
const tools = [{ type: "function", function: { name: "get_weather", parameters: object({ city: { type: "string" } }) } }]

async function chat(model) {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: limit })
  assert.ok(answer.choices[0].message.content)
  assert.ok(answer.usage.completion_tokens > 0)
}

async function stream(model) {
  let text = ""
  const chunks = await client.chat.completions.create({ model, messages, max_tokens: limit, stream: true })
  for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? ""
  assert.ok(text)
}

async function schema(model) {
  const response_format = { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } }
  const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: longer })
  isCity(JSON.parse(answer.choices[0].message.content))
}

async function tool(model) {
  const said = [{ role: "user", content: question }]
  const { message } = (await client.chat.completions.create({ model, messages: said, tools })).choices[0]
  const [call] = message.tool_calls
  assert.ok(JSON.parse(call.function.arguments).city)
  said.push(message, { role: "tool", tool_call_id: call.id, content: sunny })
  const answer = await client.chat.completions.create({ model, messages: said, tools })
  assert.ok(answer.choices[0].message.content.includes(sunny))
}

await run("openai", { chat, stream, schema, tool, error: (model) => fails(() => chat(model)) })
