import { defineConfig } from "vitest/config";

// On a loaded machine a page with ten thousand hosts takes more than the five seconds that a test has by default.
export default defineConfig({
  test: { include: ["tests/**/*.test.ts"], environment: "happy-dom", pool: "threads", isolate: false, testTimeout: 60_000 },
});
