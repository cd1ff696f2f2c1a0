// The code of a click, as a line for the notebook.

import type { Mesh } from "../cluster/state";
import { say } from "../page/language";

export type Variables = Record<string, string>; // name in the notebook: uid

/** The name of a mesh in code; `bound`: whether a variable of the notebook holds it. */
export function nameOf(mesh: Mesh, uid: string, variables: Variables): { name: string; bound: boolean } {
  const names = Object.keys(variables).filter((name) => variables[name] === uid && !name.startsWith("_"));
  const bound = names.includes(mesh.name) ? mesh.name : names[0];
  return bound ? { name: bound, bound: true } : { name: mesh.name, bound: false };
}

export type Dims = Record<string, number>;

export function codeForSpawn(name: string, dims: Dims): string {
  return `%mesh ${name} ${dimsText(dims)}`;
}

export function dimsText(dims: Dims): string {
  return Object.entries(dims).map(([label, size]) => `${label}=${size}`).join(" ");
}

/** Reads `hosts=2 gpus=4`. Throws an Error with the reason. */
export function dimsFrom(text: string): Dims {
  const dims: Dims = {};
  for (const word of text.trim().split(/[\s,]+/)) {
    const match = /^([A-Za-z_]\w*)=(\d+)$/.exec(word);
    if (!match) throw new Error(word ? say`"${word}" is not a dimension: write gpus=4, or hosts=2 gpus=4` : say`write at least one dimension, such as gpus=4`);
    const [, label, size] = match as unknown as [string, string, string];
    if (Number(size) < 1) throw new Error(say`${label} must be at least 1`);
    if (label in dims) throw new Error(say`${label} is given twice`);
    dims[label] = Number(size);
  }
  return dims;
}

/** The reason why a name is no valid variable; "" if it is. */
export function wrongName(name: string): string {
  return /^[A-Za-z_]\w*$/.test(name) ? "" : name ? say`"${name}" cannot be the name of a variable` : say`Give the mesh a name.`;
}

/** A name that no mesh has yet: workers, workers2, … */
export function freshName(existing: Iterable<string>, preferred = "workers"): string {
  const names = new Set(existing);
  let number = 1;
  while (names.has(number === 1 ? preferred : `${preferred}${number}`)) number++;
  return number === 1 ? preferred : `${preferred}${number}`;
}

/** The specification of a new mesh. */
export interface NewMesh {
  name: string;
  dims: Dims;
  /** The kind of a job, or the name of one; "" for this machine. */
  job: string;
  /** Of that job, as `%mesh` takes them. */
  arguments: string;
  /** The code that each process runs first. */
  setup: string;
  /** Made by a cell, which is written into the notebook. */
  inCell: boolean;
}

/** The cell that makes a mesh. */
export function codeForMesh({ name, dims, job, arguments: given, setup }: Omit<NewMesh, "inCell">): string {
  const line = [codeForSpawn(name, dims), ...(job ? [`--job ${job}`, given] : [])].filter(Boolean).join(" ");
  return setup ? `%${line}\n${setup}` : line;
}

/** The mesh that a form describes, or a string with its mistake. */
export function newMeshFrom(name: string, dims: string): Pick<NewMesh, "name" | "dims"> | string {
  const wrong = wrongName(name);
  if (wrong) return wrong;
  try {
    return { name, dims: dimsFrom(dims) };
  } catch (error) {
    return (error as Error).message;
  }
}
