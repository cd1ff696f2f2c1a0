import { LabIcon } from "@jupyterlab/ui-components";

// Four ranks of a mesh.
const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <rect x="3" y="3" width="8" height="8" rx="2"/>
    <rect x="13" y="3" width="8" height="8" rx="2"/>
    <rect x="3" y="13" width="8" height="8" rx="2"/>
    <path d="M15 13h4a2 2 0 0 1 2 2v4a2 2 0 0 1-2 2h-4a2 2 0 0 1-2-2v-4a2 2 0 0 1 2-2zm.5 1.8a.7.7 0 0 0-.7.7v3a.7.7 0 0 0 .7.7h3a.7.7 0 0 0 .7-.7v-3a.7.7 0 0 0-.7-.7z"/>
  </g>
</svg>`;

export const icon = new LabIcon({ name: "monarch-nb:panel", svgstr: SVG });
