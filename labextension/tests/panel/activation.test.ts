// The plugin in front ends that lack what JupyterLab has, such as Notebook 7.

import { CommandRegistry } from "@lumino/commands";
import { Signal } from "@lumino/signaling";
import { AccordionPanel, PanelLayout, Widget } from "@lumino/widgets";
import { describe, expect, it, vi } from "vitest";

// JupyterLab's own packages are its business; only what the panel is built of is stood in for.
vi.mock("@jupyterlab/application", () => ({ ILabShell: {}, ILayoutRestorer: {} }));
vi.mock("@jupyterlab/apputils", () => ({ ICommandPalette: {}, Dialog: {}, InputDialog: {}, IToolbarWidgetRegistry: {}, Notification: {}, showDialog: vi.fn() }));
vi.mock("@jupyterlab/launcher", () => ({ ILauncher: {} }));
vi.mock("@jupyterlab/notebook", () => ({ INotebookTracker: {}, NotebookActions: {} }));
vi.mock("@jupyterlab/services", () => ({ KernelMessage: {} }));
vi.mock("@jupyterlab/settingregistry", () => ({ ISettingRegistry: {} }));
vi.mock("@jupyterlab/statusbar", () => ({ IStatusBar: {} }));
vi.mock("@jupyterlab/translation", () => ({ ITranslator: {} }));
vi.mock("@jupyterlab/ui-components", () => ({
  LabIcon: class {},
  SidePanel: class extends Widget {
    readonly content = new AccordionPanel();
    constructor() {
      super();
      const layout = new PanelLayout();
      this.layout = layout;
      layout.addWidget(this.content);
    }
    addWidget(widget: Widget): void {
      this.content.addWidget(widget);
    }
  },
}));

const { commandOf } = await import("../../src/panel/commands");
const { ACTIONS } = await import("../../src/panel/table");
const { default: plugin } = await import("../../src/panel/index");

type Activate = (app: object, ...optional: unknown[]) => void;

type Shell = Record<"add" | "activateById" | "widgets", ReturnType<typeof vi.fn>>;

function app(): { commands: CommandRegistry; restored: Promise<void>; shell: Shell } {
  const shell = { add: vi.fn(), activateById: vi.fn(), widgets: vi.fn(() => []) };
  return { commands: new CommandRegistry(), restored: Promise.resolve(), shell };
}

const tracker = (): object => ({
  currentWidget: null,
  currentChanged: new Signal({}),
  forEach: () => undefined,
  widgetAdded: new Signal({}),
});

describe("the plugin", () => {
  it("asks for nothing that a front end must have", () => {
    expect(plugin.requires ?? []).toEqual([]);
  });

  it("works with notebooks alone: no palette, no status bar, no settings, no layout to restore", () => {
    const front = app();
    (plugin.activate as Activate)(front, tracker(), null, null, null, null, null);
    const [panel, area] = front.shell.add.mock.calls[0] as [Widget, string];
    expect(area).toBe("right");
    expect(panel.node.textContent).toContain("No notebook is open");
    expect(front.commands.listCommands()).toContain("monarch-nb:spawn");
    for (const action of ACTIONS) expect(front.commands.keyBindings.filter(({ command }) => command === commandOf(action))).toHaveLength(2);
    void front.commands.execute("monarch-nb:open");
    expect(front.shell.activateById).toHaveBeenCalledWith(panel.id);
  });

  it("stays away where there are no notebooks", () => {
    const front = app();
    (plugin.activate as Activate)(front, null, null, null, null, null, null);
    expect(front.shell.add).not.toHaveBeenCalled();
    expect(front.commands.listCommands()).toEqual([]);
  });
});
