// How the panel stands with the kernel of a notebook: facts in, words and wishes out.

export interface Facts {
  notebook: boolean;
  /** There is a kernel, or one is on its way. */
  kernel: boolean;
  /** The kernel's language; "" while it has not told. */
  language: string;
  /** As JupyterLab calls it: idle, busy, starting, restarting, dead, … */
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
  offersLoad: boolean;
}

/** What is said where there is no cluster to show. */
export function wordsFor(facts: Facts): Words {
  const say = (title: string, text = "", offersLoad = false): Words => ({ title, text, offersLoad });
  switch (phaseOf(facts)) {
    case "none":
      return say("No notebook in front", "Open a notebook: its meshes, failures and logs are shown here.");
    case "no-kernel":
      return say("No kernel", "This notebook has no kernel running. Its cluster is shown here when it has one.");
    case "foreign":
      return say("Not a Python kernel", `This notebook runs ${facts.language}; Monarch works from Python kernels.`);
    case "starting":
      return facts.connected || COMING.has(facts.status) ? say("The kernel is starting") : say("Not connected", "Waiting for the connection to the kernel.");
    case "loading":
      return say("Loading the extension", facts.status === "busy" ? "It is loaded when the cell that runs has ended." : "");
    case "unloaded":
      return facts.error ? say("It could not be loaded", facts.error, true) : say("Not loaded in this kernel", "The extension makes this kernel the controller of a cluster.", true);
    case "opening":
      return say("Looking for the cluster", facts.status === "busy" ? "The kernel answers when the cell that runs has ended." : "");
    case "live":
      return say("No meshes", "A mesh is a grid of processes that your actors live on. Spawn one here, or in a cell: %mesh workers gpus=4");
  }
}

/** Whether running this code may have loaded the extension. */
export function mayLoad(code: string): boolean {
  return /monarch/.test(code);
}
