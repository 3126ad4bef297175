import assert from "node:assert/strict"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateObject, generateText, stepCountIs, streamText, tool as madeTool } from "ai"
import { z } from "zod"
import { fails, hello, isCity, limit, longer, question, run, sunny, url } from "./cases.mjs"

const provider = createOpenAICompatible({ name: "disco", baseURL: url, supportsStructuredOutputs: true })
const asked = (model, more) => ({ model: provider(model), prompt: hello, maxRetries: 0, maxOutputTokens: limit, ...more })
const weather = madeTool({
  description: "Return the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is ${sunny} in ${city}.`,
})

async function chat(model) {
  const { text, usage } = await generateText(asked(model))
  assert.ok(text)
  assert.ok(usage.outputTokens > 0)
}

async function stream(model) {
  let text = ""
  for await (const part of streamText(asked(model)).textStream) text += part
  assert.ok(text)
}

async function schema(model) {
  const form = z.object({ name: z.string().max(40), people: z.number().int().min(0).max(1e9) })
  isCity((await generateObject(asked(model, { schema: form, maxOutputTokens: longer }))).object)
}

async function tool(model) {
  const more = { prompt: question, tools: { get_weather: weather }, stopWhen: stepCountIs(3) }
  assert.ok((await generateText(asked(model, more))).text.includes(sunny))
}

await run("ai", { chat, stream, schema, tool, error: (model) => fails(() => chat(model)) })
