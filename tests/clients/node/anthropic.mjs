import assert from "node:assert/strict"
import Anthropic from "@anthropic-ai/sdk"
import { fails, hello, isCity, limit, longer, question, run, sunny, url } from "./cases.mjs"

const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 })
const messages = [{ role: "user", content: hello }]
const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
})
const city = object({ name: { type: "string", maxLength: 40 }, people: { type: "integer", minimum: 0, maximum: 1e9 } })
const tools = [{ name: "get_weather", input_schema: object({ city: { type: "string" } }) }]
const said = ({ content }) => content.filter((block) => block.type === "text").map((block) => block.text).join("")

async function chat(model) {
  const answer = await client.messages.create({ model, messages, max_tokens: limit })
  assert.ok(said(answer))
  assert.ok(answer.usage.output_tokens > 0)
  assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 0)
}

async function stream(model) {
  const events = client.messages.stream({ model, messages, max_tokens: limit })
  let text = ""
  events.on("text", (piece) => (text += piece))
  assert.equal(said(await events.finalMessage()), text)
  assert.ok(text)
}

async function schema(model) {
  const output_config = { format: { type: "json_schema", schema: city } }
  isCity(JSON.parse(said(await client.messages.create({ model, messages, output_config, max_tokens: longer }))))
}

async function tool(model) {
  const turns = [{ role: "user", content: question }]
  const more = { model, messages: turns, tools, max_tokens: longer }
  const { content, stop_reason } = await client.messages.create(more)
  const [call] = content.filter((block) => block.type === "tool_use")
  assert.equal(stop_reason, "tool_use")
  assert.ok(call.input.city)
  const result = { type: "tool_result", tool_use_id: call.id, content: sunny }
  turns.push({ role: "assistant", content }, { role: "user", content: [result] })
  assert.ok(said(await client.messages.create(more)).includes(sunny))
}

await run("@anthropic-ai/sdk", { chat, stream, schema, tool, error: (model) => fails(() => chat(model)) })
