// The type that answers must have, as in person.py. Its JSON schema is whatever a client makes of it.
import { z } from "zod";

export const Person = z
  .object({
    name: z.string().max(12).describe("The first name"),
    mood: z.enum(["good", "bad"]),
    age: z.number().int().min(0).max(120),
  })
  .describe("Who somebody is.");
