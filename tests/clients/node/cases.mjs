// What all libraries are asked for, and how they tell what came of it: a line of JSON.
import assert from "node:assert/strict"
import { readFileSync } from "node:fs"

export const url = process.env.DISCO_URL
export const [limit, longer] = [24, 400] // tokens of a text, and of JSON
export const [hello, question, sunny] = ["Say hello.", "How is the weather in Paris?", "sunny"]
const models = process.env.DISCO_MODELS.split(",")
const toolModels = process.env.DISCO_TOOL_MODELS.split(",")

export function isCity(found) {
  assert.equal(typeof found.name, "string")
  assert.equal(typeof found.people, "number")
}

export async function fails(call) {
  await assert.rejects(call, (e) => e.message.includes("does not exist"))
}

export async function run(library, cases) {
  const file = new URL(`node_modules/${library}/package.json`, import.meta.url)
  const [passed, failed] = [[], {}]
  for (const [name, attempt] of Object.entries(cases)) {
    for (const model of name === "error" ? ["nobody"] : name === "tool" ? toolModels : models) {
      try {
        await attempt(model)
        passed.push(`${name} ${model}`)
      } catch (e) {
        failed[`${name} ${model}`] = `${e.name}: ${e.message}`.slice(-600)
      }
    }
  }
  console.log(JSON.stringify({ version: JSON.parse(readFileSync(file)).version, passed, failed }))
}
