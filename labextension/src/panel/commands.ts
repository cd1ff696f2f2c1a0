// The commands of the command palette, menus, keys, and buttons in outputs.

import type { JupyterFrontEnd } from "@jupyterlab/application";
import type { ICommandPalette } from "@jupyterlab/apputils";
import type { CommandRegistry } from "@lumino/commands";
import type { ReadonlyPartialJSONObject } from "@lumino/coreutils";
import { Menu } from "@lumino/widgets";

import { phrase, say } from "../page/language";
import type { Actions } from "./actions";
import { ASKED, type Asked } from "../page/notebook";
import type { Dims } from "./code";
import type { Front } from "./front";
import { icon } from "./icon";
import { phaseOf } from "./link";
import { ACTIONS, Action, Target, words } from "./table";
import { Row, targetOf } from "./tree";

export const IDS = {
  open: "monarch-nb:open",
  load: "monarch-nb:load",
  spawn: "monarch-nb:spawn",
  failures: "monarch-nb:failures",
  codes: "monarch-nb:show-code",
  insert: "monarch-nb:insert-code",
} as const;

export interface Views {
  open(): void;
  failures(): void;
  findings(): void;
  codes(): void;
  selected(): Row | null;
}

const TREE = ".mnb-panel .mnb-outline"; // the focused element of its keys

export function commandOf(action: Pick<Action, "name">): string {
  return `monarch-nb:${action.name}`;
}

/** A command, also in the palette. */
export function addCommand(app: JupyterFrontEnd, palette: ICommandPalette | null, command: string, options: CommandRegistry.ICommandOptions): void {
  app.commands.addCommand(command, options);
  palette?.addItem({ command, category: "Monarch", args: {} });
}

export function addCommands(app: JupyterFrontEnd, front: Front, actions: Actions, views: Views, palette: ICommandPalette | null): void {
  const { commands } = app;
  const live = (): boolean => Boolean(front.connection && phaseOf(front.connection.facts) === "live");

  /** The mesh that arguments name, by uid or by name; else the selection of the panel. */
  function selection(args: ReadonlyPartialJSONObject): { uid: string; ranks: number[] | null } | null {
    const mesh = typeof args.mesh === "string" ? args.mesh : "";
    const ranks = Array.isArray(args.ranks) ? (args.ranks as number[]) : null;
    if (!mesh) {
      const row = views.selected();
      return row && targetOf(row);
    }
    const meshes = front.connection?.cluster.state.meshes ?? {};
    if (mesh in meshes) return { uid: mesh, ranks };
    const foundUid = Object.keys(meshes).find((uid) => meshes[uid]?.name === mesh && !meshes[uid]?.stopped);
    return { uid: foundUid ?? mesh, ranks };
  }

  function targetFrom(args: ReadonlyPartialJSONObject): Target | null {
    const target = selection(args);
    return target && actions.target(target.uid, target.ranks);
  }

  function labelOf(action: Action, args: ReadonlyPartialJSONObject): string {
    const label = phrase(action.label);
    if (args.palette) return say`${label}: What Is Selected`;
    const on = targetFrom(args);
    if (args.code) return on ? (actions.code(action, on).split("\n")[0] as string) : label;
    return on && args.mesh ? `${label} ${words(on)}` : label;
  }

  commands.addCommand(IDS.open, { label: say`Show the Cluster of This Notebook`, icon, execute: () => views.open() });
  commands.addCommand(IDS.load, {
    label: say`Load Monarch into the Kernel`,
    isEnabled: () => Boolean(front.connection && phaseOf(front.connection.facts) === "unloaded"),
    execute: () => front.connection?.load(),
  });
  commands.addCommand(IDS.spawn, {
    label: say`Spawn a Mesh…`,
    isEnabled: live,
    execute: (args) => {
      views.open();
      return actions.spawn(args.name as string | undefined, args.dims as Dims | undefined);
    },
  });
  for (const action of ACTIONS) {
    const command = commandOf(action);
    commands.addCommand(command, {
      label: (args) => labelOf(action, args),
      caption: phrase(action.hint),
      isEnabled: (args) => {
        if (args.mesh || args.all || !live()) return live();
        const on = targetFrom(args);
        return on !== null && (Boolean(args.code) || action.applies(on));
      },
      execute: (args) => {
        if (args.palette || args.mesh) views.open();
        if (action.name === "heal" && args.all) return actions.healAll();
        const target = selection(args);
        if (!target) return undefined;
        if (args.code) return actions.insert(action.name, target.uid, target.ranks);
        return actions.act(action.name, target.uid, target.ranks, action.name === "interrupt" && Boolean(args.sure));
      },
    });
    commands.addKeyBinding({ command, args: {}, keys: [action.key], selector: TREE });
    commands.addKeyBinding({ command, args: { code: true }, keys: [`Shift ${action.key}`], selector: TREE });
  }
  commands.addCommand(IDS.failures, {
    label: say`Show Failures`,
    execute: () => {
      views.open();
      views.failures();
    },
  });
  commands.addCommand("monarch-nb:why-all", {
    label: say`Why Does Nothing Move?`,
    isEnabled: live,
    execute: () => {
      views.open();
      views.findings();
    },
  });
  commands.addCommand(IDS.codes, {
    label: say`Show the Code of All Actions`,
    isEnabled: live,
    execute: () => {
      views.open();
      views.codes();
    },
  });
  commands.addCommand(IDS.insert, {
    label: say`Insert the Code of the Last Action`,
    isEnabled: ({ code }) => Boolean(code || actions.outcome.code),
    execute: ({ code, run }) => {
      // A display in a cell sends the code of its action.
      if (typeof code !== "string") return front.insert(actions.outcome.code);
      return run ? front.run(code) : front.insert(code);
    },
  });
  document.addEventListener(ASKED, (event) => {
    const { command, args } = (event as CustomEvent<Asked>).detail;
    if (!live() || !front.notebook?.node.contains(event.target as Node)) return;
    event.preventDefault(); // marks the event as handled
    void commands.execute(command, args as ReadonlyPartialJSONObject);
  });
  if (!palette) return;
  const category = "Monarch";
  for (const command of [IDS.open, IDS.load, IDS.spawn, IDS.failures, "monarch-nb:why-all", IDS.codes, IDS.insert]) palette.addItem({ command, category, args: {} });
  for (const action of ACTIONS) palette.addItem({ command: commandOf(action), category, args: { palette: true } });
  palette.addItem({ command: commandOf({ name: "heal" }), category, args: { all: true } });
}

/** The menu of the selection in the tree: its possible actions, and their code. */
export function openMenu(app: JupyterFrontEnd, x: number, y: number): void {
  const { commands } = app;
  const menu = new Menu({ commands });
  const code = new Menu({ commands });
  code.title.label = say`Insert Code`;
  const usable = ACTIONS.filter((action) => commands.isEnabled(commandOf(action), {}));
  for (const action of usable) {
    if (action.ends && !menu.items.some((item) => item.type === "separator")) menu.addItem({ type: "separator" });
    menu.addItem({ command: commandOf(action), args: {} });
    code.addItem({ command: commandOf(action), args: { code: true } });
  }
  menu.addItem({ type: "separator" });
  menu.addItem({ type: "submenu", submenu: code });
  menu.aboutToClose.connect(() => setTimeout(() => menu.dispose(), 0));
  menu.open(x, y);
}
