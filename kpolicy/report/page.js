"use strict";
const some = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Boxes that are wider than the window: their captions say that they scroll.
const cut = new ResizeObserver((boxes) => requestAnimationFrame(() => boxes.forEach(({ target }) => {
  const box = target.closest(".scroll");
  box.previousElementSibling.classList.toggle("wide", box.scrollWidth > box.clientWidth);
})));
document.querySelectorAll(".scroll, .scroll > table").forEach((each) => cut.observe(each));

// Tables: a column's head sorts by it, first falling for numbers.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
    };
    const rows = [...table.tBodies[0].rows];
    const numbers = rows.every((row) => typeof key(row) === "number");
    const was = head.getAttribute("aria-sort");
    const down = was ? was === "ascending" : numbers && column > 0;
    rows.sort((a, b) => {
      const one = key(a), other = key(b);
      const order = numbers ? one - other : String(one).localeCompare(String(other), "en");
      return down ? -order : order;
    });
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  }));
}

// What to paste: copy it, or save it as a file.
for (const box of document.querySelectorAll(".paste")) {
  const pre = box.querySelector("pre"), name = box.dataset.file;
  const buttons = document.createElement("div");
  buttons.className = "buttons";
  const add = (label, action) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", () => action(button));
    buttons.append(button);
  };
  add("Copy", (button) => {
    const done = (text) => { button.textContent = text; setTimeout(() => { button.textContent = "Copy"; }, 2000); };
    const select = () => { getSelection().selectAllChildren(pre); done("Selected: press Ctrl+C"); };
    if (navigator.clipboard) navigator.clipboard.writeText(pre.textContent).then(() => done("Copied"), select);
    else select();
  });
  if (name) add("Save " + name, () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([pre.textContent], { type: "text/plain" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  pre.after(buttons);
}

// The map: a batch that is touched is told in words.
for (const map of document.querySelectorAll("table.map")) {
  const said = map.closest(".scroll").nextElementSibling;
  const tell = (event) => {
    const cell = event.target.closest("td[title]");
    if (!cell) return;
    map.querySelectorAll(".picked").forEach((each) => each.classList.remove("picked"));
    cell.classList.add("picked");
    said.textContent = cell.title;
  };
  map.addEventListener("click", tell);
  map.addEventListener("pointerover", tell);
}

// The timeline: bins of the whole run, single steps of its slowest stretch.
const LETTERS = { full: "F", piecewise: "P", split: "S", eager: "E" };
const LANE = 64, QUEUE = 34, NAME = 20, AXIS = 24;

function nice(span) {
  const rough = span / 5, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough);
}

function stamp(us, step) {
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / 1e6) + 1e-9)));
  return (us / 1e6).toFixed(digits) + " s";
}

function timeline(place, data) {
  const view = document.createElement("div"), said = document.createElement("p"), buttons = document.createElement("div");
  view.className = "view";
  view.tabIndex = 0;
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", "Timeline. Arrows move it, plus and minus zoom, 0 shows all of it.");
  said.className = "said";
  said.setAttribute("aria-live", "polite");
  buttons.className = "buttons";
  const end = Math.max(data.end, 1), least = 200;
  let from = 0, to = end, chosen = null;
  const patterns = ["full", "piecewise", "split", "eager"];
  const number = place.dataset.number;
  const fills = '<defs>' +
    `<pattern id="p-piecewise-${number}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="f-piecewise" width="7" height="7"/><rect width="2" height="7" fill="#0003"/></pattern>` +
    `<pattern id="p-split-${number}" width="6" height="6" patternUnits="userSpaceOnUse"><rect class="f-split" width="6" height="6"/><circle cx="3" cy="3" r="1.3" fill="#0004"/></pattern>` +
    `<pattern id="p-eager-${number}" width="7" height="7" patternUnits="userSpaceOnUse"><rect class="f-eager" width="7" height="7"/><rect width="2" height="7" fill="#0003"/></pattern></defs>`;
  const fill = (mode) => `style="fill:${patterns[mode] === "full" ? "var(--full)" : `url(#p-${patterns[mode]}-${number})`}"`;

  function lane(run, top, width, x) {
    const busy = data.modes.map(() => ""), floor = top + LANE;
    const first = Math.max(0, Math.floor(from / run.bin)), last = Math.min(run.running.length - 1, Math.floor(to / run.bin));
    // At most a column a pixel.
    const group = Math.max(1, Math.floor((last - first + 1) / width));
    const most = Math.max(1, ...run.running, ...run.waiting), bottom = floor + QUEUE;
    let running = "", waiting = "";
    const steps = inside(run);
    for (let i = first; i <= last; i += group) {
      const upto = Math.min(i + group, last + 1), left = Math.max(0, x(i * run.bin)), right = Math.min(width, x(upto * run.bin));
      let below = 0, runs = 0, waits = 0;
      if (!steps) data.modes.forEach((_, mode) => {
        let sum = 0;
        for (let j = i; j < upto; j++) sum += run.busy[mode][j];
        const share = Math.min(sum / 1000 / (upto - i), 1 - below);
        if (share > 0.0005) {
          const high = LANE * share;
          busy[mode] += `M${left.toFixed(1)} ${(floor - LANE * below).toFixed(1)}H${right.toFixed(1)}v${(-high).toFixed(1)}H${left.toFixed(1)}z`;
          below += share;
        }
      });
      for (let j = i; j < upto; j++) { runs = Math.max(runs, run.running[j]); waits = Math.max(waits, run.waiting[j]); }
      const level = (many) => (bottom - (QUEUE - 6) * many / most).toFixed(1);
      running += `${running ? "L" : "M"}${left.toFixed(1)} ${level(runs)}H${right.toFixed(1)}`;
      waiting += `${waiting ? "L" : "M"}${left.toFixed(1)} ${level(waits)}H${right.toFixed(1)}`;
    }
    let shown = `<text x="2" y="${top - 6}">${escaped(run.name)}</text><text x="${width - 2}" y="${top - 6}" text-anchor="end">up to ${some(most, "request")}</text><rect class="ground" x="0" y="${top}" width="${width}" height="${LANE}"/>`;
    if (steps) for (const step of steps) {
      const left = Math.max(0, x(step[0])), right = Math.min(width, x(step[0] + step[1]));
      shown += `<rect class="edge" ${fill(step[2])} x="${left.toFixed(2)}" y="${top}" width="${Math.max(right - left, 0.5).toFixed(2)}" height="${LANE}"/>`;
      if (right - left > 14) shown += `<text class="letter" x="${((left + right) / 2).toFixed(1)}" y="${top + LANE / 2 + 4}">${LETTERS[data.modes[step[2]]]}</text>`;
    }
    else busy.forEach((path, mode) => { if (path) shown += `<path ${fill(mode)} d="${path}"/>`; });
    return shown + `<path class="grid" d="M0 ${bottom}.5H${width}"/><path class="waiting" d="${waiting}"/><path class="running" d="${running}"/>`;
  }

  // The single steps of a run in view, where the whole view has them and they aren't too many.
  function inside(run) {
    const kept = run.steps;
    if (!kept.length || from < kept[0][0] || to > kept[kept.length - 1][0] + kept[kept.length - 1][1]) return null;
    const found = kept.filter((step) => step[0] + step[1] > from && step[0] < to);
    return found.length <= 600 ? found : null;
  }

  const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

  function draw() {
    const width = Math.max(view.clientWidth, 50), x = (us) => (us - from) / (to - from) * width;
    const each = NAME + LANE + QUEUE, height = each * data.runs.length + AXIS;
    let shown = "";
    data.runs.forEach((run, i) => { shown += lane(run, each * i + NAME, width, x); });
    const step = nice(to - from);
    for (let us = Math.ceil(from / step) * step; us <= to; us += step) {
      const at = x(us), anchor = at < 30 ? "start" : at > width - 30 ? "end" : "middle";
      shown += `<path class="grid" d="M${at.toFixed(1)} ${height - AXIS}v5"/><text x="${at.toFixed(1)}" y="${height - 6}" text-anchor="${anchor}">${stamp(us, step)}</text>`;
    }
    if (chosen) shown += `<rect class="chosen" x="${Math.min(...chosen)}" y="0" width="${Math.abs(chosen[1] - chosen[0])}" height="${height}"/>`;
    view.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}">${fills}${shown}</svg>`;
  }

  function show(low, high) {
    const span = Math.min(Math.max(high - low, least), end);
    from = Math.min(Math.max(low, 0), end - span);
    to = from + span;
    draw();
  }
  const zoom = (by, at = (from + to) / 2) => show(at - (at - from) * by, at + (to - at) * by);
  const move = (by) => show(from + (to - from) * by, to + (to - from) * by);

  function tell(px, py) {
    const us = from + px / Math.max(view.clientWidth, 1) * (to - from), each = NAME + LANE + QUEUE;
    const run = data.runs[Math.min(Math.max(Math.floor(py / each), 0), data.runs.length - 1)];
    const step = (inside(run) || []).find((one) => one[0] <= us && us < one[0] + one[1]);
    if (step) {
      said.textContent = `${run.name} at ${(step[0] / 1e6).toFixed(3)} s: ${data.modes[step[2]]}, ${(step[1] / 1e3).toFixed(2)} ms, ` +
        `${some(step[3], "decode row")}, ${some(step[4], "prompt token")}, ${step[5]} padding, ${data.reasons[step[6]]}`;
      return;
    }
    const bin = Math.floor(us / run.bin);
    if (bin >= run.running.length) { said.textContent = `${run.name} at ${(us / 1e6).toFixed(2)} s: over`; return; }
    const shares = data.modes.map((mode, i) => [mode, run.busy[i][bin] / 10]).filter((one) => one[1] > 0);
    const idle = 100 - shares.reduce((sum, one) => sum + one[1], 0);
    if (idle >= 0.05) shares.push(["idle", idle]);
    said.textContent = `${run.name} at ${(us / 1e6).toFixed(2)} s: ` + shares.map((one) => `${one[0]} ${one[1].toFixed(1)}%`).join(", ") +
      `; ${run.running[bin]} running, ${run.waiting[bin]} waiting`;
  }

  const add = (label, name, action) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", action);
    buttons.append(button);
  };
  add("+", "zoom in", () => zoom(0.5));
  add("\u2212", "zoom out", () => zoom(2));
  add("\u25C0", "earlier", () => move(-0.5));
  add("\u25B6", "later", () => move(0.5));
  add("All", "the whole run", () => show(0, end));
  data.runs.forEach((run) => {
    const kept = run.steps;
    // Around its slowest step, as many as can be told apart.
    const peak = kept.reduce((best, step, i) => step[1] > kept[best][1] ? i : best, 0);
    if (kept.length) add("Slowest: " + run.name, "the slowest steps of " + run.name, () => {
      const few = kept.slice(Math.max(0, peak - 20), peak + 20), last = few[few.length - 1];
      show(few[0][0], last[0] + last[1]);
    });
  });

  view.addEventListener("keydown", (event) => {
    const action = { ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, end) }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  view.addEventListener("wheel", (event) => {
    // Without Ctrl, which a pinch on a touch pad sets too, the wheel goes on scrolling the page.
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = view.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, from + (event.clientX - box.left) / box.width * (to - from));
  }, { passive: false });
  const pointers = new Map();
  const place_of = (event) => { const box = view.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width]; };
  view.addEventListener("pointerdown", (event) => {
    const [x] = place_of(event);
    pointers.set(event.pointerId, x);
    if (event.pointerType === "mouse") { chosen = [x, x]; view.setPointerCapture(event.pointerId); }
  });
  view.addEventListener("pointermove", (event) => {
    const [x, y, width] = place_of(event);
    if (pointers.size === 2 && pointers.has(event.pointerId)) {
      // Two fingers: what was under each stays under it.
      const [one, other] = [...pointers.values()], us = (px) => from + px / width * (to - from);
      const held = [us(one), us(other)].sort((a, b) => a - b);
      pointers.set(event.pointerId, x);
      const now = [...pointers.values()].sort((a, b) => a - b);
      if (now[1] - now[0] > 10) {
        const span = (held[1] - held[0]) * width / (now[1] - now[0]);
        show(held[0] - now[0] / width * span, held[0] - now[0] / width * span + span);
      }
      return;
    }
    if (chosen) { chosen[1] = Math.min(Math.max(x, 0), width); draw(); }
    tell(x, y);
  });
  const over = (event) => {
    const [, , width] = place_of(event);
    pointers.delete(event.pointerId);
    if (!chosen) return;
    const [low, high] = [...chosen].sort((a, b) => a - b);
    chosen = null;
    if (event.type === "pointerup" && high - low > 6) show(from + low / width * (to - from), from + high / width * (to - from));
    else draw();
  };
  view.addEventListener("pointerup", over);
  view.addEventListener("pointercancel", over);

  place.replaceChildren(buttons, view, said);
  new ResizeObserver(draw).observe(view);
  draw();
}

const values = JSON.parse(document.getElementById("data").textContent);
for (const place of document.querySelectorAll(".timeline[data-number]")) timeline(place, values[Number(place.dataset.number)]);
