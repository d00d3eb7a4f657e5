"use strict";
const view = document.querySelector(".view"), svg = view.querySelector("svg"), shown = document.querySelector("output");
const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
let scale = 1;
function zoom(to, x = view.clientWidth / 2, y = view.clientHeight / 2) {
  const next = Math.min(4, Math.max(0.05, to)), box = svg.getBoundingClientRect(), frame = view.getBoundingClientRect();
  const px = (x - (box.left - frame.left)) / scale, py = (y - (box.top - frame.top)) / scale;
  scale = next;
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
  const after = svg.getBoundingClientRect();
  view.scrollLeft += after.left - frame.left + px * scale - x;
  view.scrollTop += after.top - frame.top + py * scale - y;
  shown.textContent = Math.round(scale * 100) + " %";
}
function fit() { zoom(Math.min(1, (view.clientWidth - 2) / width)); }
const actions = {in: () => zoom(scale * 1.25), out: () => zoom(scale / 1.25), full: () => zoom(1), fit};
for (const button of document.querySelectorAll("[data-do]"))
  button.addEventListener("click", () => actions[button.dataset.do]());
view.addEventListener("keydown", event => {
  const name = {"+": "in", "=": "in", "-": "out", "1": "full", "0": "fit"}[event.key];
  if (name && !event.ctrlKey && !event.metaKey && !event.altKey) { actions[name](); event.preventDefault(); }
});
view.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  const frame = view.getBoundingClientRect();
  zoom(scale * Math.exp(-event.deltaY / 400), event.clientX - frame.left, event.clientY - frame.top);
  event.preventDefault();
}, {passive: false});
let from = null;
view.addEventListener("pointerdown", event => {
  if (event.pointerType !== "mouse" || event.button) return;
  const frame = view.getBoundingClientRect();
  if (event.clientX - frame.left > view.clientWidth || event.clientY - frame.top > view.clientHeight) return;
  from = [event.clientX + view.scrollLeft, event.clientY + view.scrollTop];
  view.setPointerCapture(event.pointerId);
  view.classList.add("drag");
});
view.addEventListener("pointermove", event => {
  if (!from) return;
  view.scrollLeft = from[0] - event.clientX;
  view.scrollTop = from[1] - event.clientY;
});
for (const name of ["pointerup", "pointercancel"])
  view.addEventListener(name, () => { from = null; view.classList.remove("drag"); });
for (const head of document.querySelectorAll("th[data-sort]")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0], index = head.cellIndex;
    const key = row => Number(row.cells[index].dataset.v);
    body.append(...[...body.rows].sort((a, b) => sign * (key(a) - key(b))));
  });
}
document.querySelector(".bar").hidden = false;
zoom(Math.max(0.6, Math.min(1, (view.clientWidth - 2) / width)));
view.scrollTo(0, 0);
