// The questions that a prompt has left in a cell.

/**
 * JupyterLab leaves the boxes of questions in the cell after the kernel has given them up: they are answered, with a comment
 * that stays to be read behind the prompt.
 */
export function answerQuestions(area: Element | null, text: string): void {
  for (const box of area?.querySelectorAll<HTMLInputElement>(".jp-Stdin-input") ?? []) {
    // Another question, of the user's own `input()`, is left alone.
    if (!box.closest(".jp-Stdin")?.textContent?.includes("mdb ")) continue;
    box.value = `# ${text}`;
    box.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  }
}
