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
.hw-high { position: absolute; top: 0; bottom: 0; border-left: 1px dashed var(--input-text); }
.hw-mark {
  position: absolute; top: -4px; bottom: -4px; width: 20px; margin-left: -10px; cursor: ew-resize; pointer-events: auto; touch-action: none;
}
.hw-mark::before {
  content: ""; position: absolute; left: 8px; top: 0; bottom: 0; width: 4px; border-radius: 2px; background: var(--input-text);
  box-shadow: 0 0 0 1px var(--comfy-menu-bg);
}
.hw-mark[aria-disabled="true"] { cursor: not-allowed; opacity: 0.6; }
.hw-legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px !important; margin: 4px 0 !important; }
.hw-legend li { display: flex; align-items: center; gap: 5px; max-width: 100%; }
.hw-name { min-width: 0; overflow-wrap: anywhere; }
.hw-card { padding: 8px 10px !important; border: 1px solid var(--border-color); border-radius: 6px; }
.hw-card dl { display: grid; grid-template-columns: max-content 1fr; gap: 1px 10px; margin: 4px 0; font-size: 12px; }
.hw-card dt { color: var(--descrip-text); }
.hw-cards, .hw-events { gap: 8px; }
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
@container (min-width: 560px) { .hw-cards { grid-template-columns: 1fr 1fr; } }
`;
