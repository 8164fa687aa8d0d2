// @ts-check
// How the memory panel looks, in the page's own colours; right from 320 px on. It imports nothing.

export const STYLE = `
.hw-panel {
  container-type: inline-size; box-sizing: border-box; min-height: 100%; padding: 12px;
  color: var(--input-text); background: var(--comfy-menu-bg); font: 13px/1.45 sans-serif; overflow-wrap: anywhere; user-select: text;
}
.hw-panel [hidden] { display: none !important; }
.hw-panel :is(h2, h3, h4, p, ul, ol, dl, dd) { margin: 0; padding: 0; list-style: none; font-weight: normal; font-size: inherit; }
.hw-panel h2 { font-size: 16px; font-weight: 600; margin-bottom: 8px; }
.hw-panel h3 { font-weight: 600; margin: 0 0 8px; }
.hw-panel h4 { font-weight: 600; }
.hw-panel section { border-top: 1px solid var(--border-color); padding-top: 10px; margin-top: 12px; }
.hw-advice { display: grid; gap: 4px; padding: 8px 10px !important; border-left: 3px solid #0e8aa8; background: var(--comfy-input-bg); border-radius: 4px; }
.hw-list { display: grid; gap: 14px; }
.hw-row { display: flex; align-items: baseline; gap: 8px; }
.hw-row > :nth-last-child(2) { flex: 1; min-width: 0; }
.hw-amount { white-space: nowrap; font-variant-numeric: tabular-nums; }
.hw-quiet { color: var(--descrip-text); font-size: 12px !important; }
.hw-scale { position: relative; margin: 6px 0 4px; }
.hw-track {
  display: flex; height: 18px; overflow: hidden; border: 1px solid var(--border-color); border-radius: 4px; background: var(--comfy-input-bg);
}
.hw-segment { flex: none; min-width: 2px; }
.hw-swatch { display: inline-block; flex: none; width: 10px; height: 10px; border-radius: 2px; }
.hw-staging { background: repeating-linear-gradient(45deg, #d0a000 0 3px, #6d5a10 3px 6px); }
.hw-activations { background: repeating-linear-gradient(90deg, #e0637c 0 3px, #93324a 3px 6px); }
.hw-lent { background: repeating-linear-gradient(-45deg, #8a8f98 0 2px, transparent 2px 6px); }
.hw-other { background: #8a8f98; }
.hw-free { background: var(--comfy-input-bg); box-shadow: inset 0 0 0 1px var(--border-color); }
.hw-marks { position: absolute; inset: 0; pointer-events: none; }
.hw-marked { margin: 16px 0 18px; }
.hw-mark { position: absolute; width: 24px; height: 26px; margin-left: -12px; cursor: ew-resize; pointer-events: auto; touch-action: none; }
.hw-mark.hw-low { top: 10px; }
.hw-mark.hw-high { bottom: 10px; }
.hw-mark::before { content: ""; position: absolute; left: 11px; height: 20px; border-left: 2px solid var(--input-text); filter: drop-shadow(0 0 1px var(--comfy-menu-bg)); }
.hw-mark::after {
  content: ""; position: absolute; left: 6px; width: 12px; height: 12px; box-sizing: border-box; border: 2px solid var(--input-text);
  border-radius: 50%; background: var(--input-text);
}
.hw-low::before { bottom: 16px; }
.hw-low::after { bottom: 4px; }
.hw-high::before { top: 16px; border-left-style: dashed; }
.hw-high::after { top: 4px; background: var(--comfy-menu-bg); }
.hw-mark:hover::after { transform: scale(1.2); }
.hw-mark[aria-disabled="true"] { cursor: not-allowed; opacity: 0.6; }
.hw-legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px !important; margin: 4px 0 !important; }
.hw-legend li { display: flex; align-items: center; gap: 5px; max-width: 100%; }
.hw-name { min-width: 0; overflow-wrap: anywhere; }
.hw-table { width: 100%; border-collapse: collapse; font-size: 12px; }
.hw-table :is(th, td) { padding: 6px 10px 6px 0; text-align: start; vertical-align: top; font-weight: normal; overflow-wrap: break-word; }
.hw-table :is(.hw-component, .hw-node) { overflow-wrap: anywhere; min-width: 90px; }
.hw-table tr > :last-child { padding-right: 0; }
.hw-table tbody tr { border-top: 1px solid var(--border-color); }
.hw-table .hw-head { padding-top: 0; color: var(--descrip-text); vertical-align: bottom; white-space: nowrap; }
.hw-table td:is(.hw-size, .hw-last_use) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.hw-table td.hw-where { min-width: 80px; }
.hw-table td.hw-actions { min-width: 150px; }
.hw-title { display: flex; gap: 6px; align-items: baseline; font-weight: 600; }
.hw-panel .hw-sort { padding: 0; border: 0; min-height: 20px; background: none; color: inherit; text-align: start; }
.hw-panel .hw-sort::after { content: " \\2195"; }
.hw-panel [aria-sort="ascending"] .hw-sort::after { content: " \\2191"; }
.hw-panel [aria-sort="descending"] .hw-sort::after { content: " \\2193"; }
.hw-panel [aria-sort$="scending"] .hw-sort, .hw-panel .hw-sort:hover { color: var(--input-text); text-decoration: underline; text-underline-offset: 3px; }
.hw-table .hw-buttons { margin: 0; }
.hw-table .hw-quiet { margin-top: 4px; }
.hw-table .hw-buttons[hidden] + .hw-quiet { margin-top: 0; }
.hw-events { gap: 8px; }
.hw-buttons { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 6px; }
.hw-panel button, .hw-panel input, .hw-panel select {
  font: inherit; font-size: 12px; color: var(--input-text); background: var(--comfy-input-bg); border: 1px solid var(--border-color);
  border-radius: 4px; padding: 3px 9px; min-height: 26px; box-sizing: border-box;
}
.hw-panel button { cursor: pointer; }
.hw-panel button:hover { border-color: var(--input-text); }
.hw-panel button[aria-pressed="true"] { background: #0e6f87; border-color: #0e6f87; color: #fff; }
.hw-panel button[aria-disabled="true"] { opacity: 0.5; cursor: default; border-color: var(--border-color); }
.hw-panel button[aria-busy="true"] { opacity: 0.6; cursor: progress; }
.hw-panel .hw-link {
  padding: 0; margin-right: 8px; border: 0; min-height: 0; background: none; text-align: start; text-decoration: underline; text-underline-offset: 2px;
}
.hw-panel :focus-visible { outline: 2px solid var(--input-text); outline-offset: 2px; border-radius: 4px; }
.hw-timeline svg { display: block; }
.hw-timeline > button { margin-top: 6px; }
.hw-filter { display: grid; grid-template-columns: 1fr max-content; gap: 6px; margin-bottom: 6px; }
.hw-filter > * { min-width: 0; }
.hw-events { display: grid; font-size: 12px !important; margin-top: 6px !important; }
.hw-events li { border-top: 1px solid var(--border-color); padding-top: 6px; }
.hw-event { display: flex; gap: 8px; align-items: baseline; }
.hw-kind { flex: none; border: 1px solid var(--border-color); border-radius: 4px; padding: 0 5px; }
@container (max-width: 779.9px) {
  .hw-table, .hw-table :is(thead, tbody) { display: block; }
  .hw-table .hw-head:not([aria-sort]) { display: none; }
  .hw-table thead tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding-bottom: 8px; }
  .hw-table tbody tr { display: grid; grid-template-columns: max-content 1fr; gap: 2px 10px; padding: 8px 0; }
  .hw-table :is(th, td) { padding: 0; }
  .hw-table tbody :is(th, .hw-actions) { grid-column: 1 / -1; }
  .hw-table tbody td:not(.hw-actions) { display: grid; grid-template-columns: subgrid; grid-column: span 2; }
  .hw-table tbody td:not(.hw-actions)::before { content: attr(data-label); color: var(--descrip-text); }
  .hw-table .hw-actions { padding-top: 4px; }
}
@container (min-width: 400px) and (max-width: 779.9px) {
  .hw-table tbody tr { grid-template-columns: max-content 1fr max-content 1fr; }
}
`;
