// The state of the panel's connection to a kernel: facts in, texts and wishes out.

import { say } from "../page/language";

export interface Facts {
  notebook: boolean;
  /** A kernel runs or starts. */
  kernel: boolean;
  /** The kernel's language; "" until it is known. */
  language: string;
  /** In JupyterLab's terms: idle, busy, starting, restarting, dead, … */
  status: string;
  connected: boolean;
  comm: "none" | "opening" | "live" | "refused";
  loading: boolean;
  /** Why loading the extension went wrong; "" if it did not. */
  error: string;
}

export const NOTHING: Facts = { notebook: false, kernel: false, language: "", status: "unknown", connected: false, comm: "none", loading: false, error: "" };

export type Phase = "none" | "no-kernel" | "foreign" | "starting" | "opening" | "unloaded" | "loading" | "live";

const COMING = new Set(["starting", "restarting", "autorestarting"]);
const OVER = new Set(["dead", "terminating"]);

export function phaseOf(facts: Facts): Phase {
  if (!facts.notebook) return "none";
  if (!facts.kernel || OVER.has(facts.status)) return "no-kernel";
  if (COMING.has(facts.status) || !facts.connected) return "starting";
  if (facts.language && facts.language !== "python") return "foreign";
  if (facts.loading) return "loading";
  if (facts.comm === "live") return "live";
  if (facts.comm === "refused") return "unloaded";
  return "opening";
}

/** Whether a comm should be opened now. */
export function wantsComm(facts: Facts): boolean {
  return phaseOf(facts) === "opening" && facts.comm === "none" && facts.language === "python";
}

export interface Words {
  title: string;
  text: string;
  /** The code to type in a cell; "" for none. */
  code: string;
  offersLoad: boolean;
}

const purpose = (): string => say`This panel shows the processes and actors that a notebook starts: their state, their output, and failures.`;

/** The text in place of a cluster. */
export function wordsFor(facts: Facts): Words {
  const words = (title: string, text = "", code = "", offersLoad = false): Words => ({ title, text, code, offersLoad });
  switch (phaseOf(facts)) {
    case "none":
      return words(say`No notebook is open`, say`${purpose()} Open a notebook to begin.`);
    case "no-kernel":
      return words(say`This notebook has no kernel`, say`Choose one in the menu: Kernel > Change Kernel. The panel then shows what it starts.`);
    case "foreign":
      return words(say`This is not a Python kernel`, say`The notebook runs ${facts.language}. Monarch needs a Python kernel: Kernel > Change Kernel.`);
    case "starting":
      return facts.connected || COMING.has(facts.status) ? words(say`The kernel is starting`) : words(say`The kernel is not connected`, say`JupyterLab is connecting to it. If that takes long: Kernel > Reconnect to Kernel.`);
    case "loading":
      return words(say`Monarch is being loaded`, facts.status === "busy" ? say`It waits for the running cell.` : "");
    case "unloaded":
      return facts.error
        ? words(say`Monarch could not be loaded`, facts.error, "%load_ext monarch", true)
        : words(say`Monarch is not loaded in this notebook`, say`${purpose()} Load Monarch here, or in a cell:`, "%load_ext monarch", true);
    case "opening":
      return words(say`Waiting for the kernel`, facts.status === "busy" ? say`It answers when the running cell has ended.` : "");
    case "live":
      return words(say`No processes yet`, say`${purpose()} To start four processes on this machine, press Spawn… above, or type in a cell:`, "%mesh workers gpus=4");
  }
}

/** Whether running this code may have loaded the extension. */
export function mayLoad(code: string): boolean {
  return /monarch/.test(code);
}
