import assert from "node:assert/strict"
import { Ollama } from "ollama"
import { fails, hello, isCity, limit, longer, question, run, sunny, url } from "./cases.mjs"

const client = new Ollama({ host: url.replace(/\/v1$/, "") })
const messages = [{ role: "user", content: hello }]
const object = (properties) => ({ type: "object", properties, required: Object.keys(properties) })
const city = object({ name: { type: "string", maxLength: 40 }, people: { type: "integer", minimum: 0, maximum: 1e9 } })
const tools = [{ type: "function", function: { name: "get_weather", parameters: object({ city: { type: "string" } }) } }]
const asked = (model, more) => ({ model, messages, options: { num_predict: limit }, ...more })

async function chat(model) {
  const answer = await client.chat(asked(model))
  assert.ok(answer.message.content)
  assert.ok(answer.eval_count > 0)
  assert.ok((await client.list()).models.some((one) => one.model === `${model}:latest`))
  assert.equal((await client.embed({ model: "disco", input: ["a", "b"] })).embeddings.length, 2)
}

async function stream(model) {
  let text = ""
  for await (const part of await client.chat(asked(model, { stream: true }))) text += part.message.content
  assert.ok(text)
}

async function schema(model) {
  const answer = await client.chat(asked(model, { format: city, options: { num_predict: longer } }))
  isCity(JSON.parse(answer.message.content))
}

async function tool(model) {
  const said = [{ role: "user", content: question }]
  const { message } = await client.chat({ model, messages: said, tools })
  const [call] = message.tool_calls
  assert.ok(call.function.arguments.city)
  said.push(message, { role: "tool", tool_name: call.function.name, content: sunny })
  assert.ok((await client.chat({ model, messages: said, tools })).message.content.includes(sunny))
}

await run("ollama", { chat, stream, schema, tool, error: (model) => fails(() => chat(model)) })
