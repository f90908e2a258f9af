// Corrects lines and areas by hand, measures again and saves: what changes, how it is drawn and its numbers. viewer.js hands over
// keys and pointers; viewer_etdrs.js, which comes before, measures.
"use strict";
const octfmCorrect = (() => {
  const { bytes, clamp } = octfmPaint;
  const ABSENT = 65535, TOOLS = ["pull", "draw", "remove", "paint", "erase"], NEAR_PX = 14, MAP_MM = 3.4;
  // Rows are kept to a thousandth, as the file has them: the numbers shown are those of the file.
  const kept = (row) => Math.fround(Math.round(row * 1000) / 1000);

  // hooks: redraw(), at() -> {kept, row, column}, go(kept), on() shows what is corrected.
  function open(root, volume, hooks) {
    const edit = volume.correct, find = (name) => root.querySelector(`[data-part="${name}"]`);
    const words = (name) => edit.named[name] || name;
    const [D, H, W] = edit.shape, S = edit.surfaces.length, { field, rules } = edit;
    const [ilm, bm, inner] = ["ilm", "bm", "ipl_inl"].map((name) => edit.surfaces.indexOf(name));
    const found = Float32Array.from(new Uint16Array(bytes(edit.rows).buffer), (v) => v === ABSENT ? NaN : kept(v / edit.steps - edit.outside));
    const rows = found.slice(), expected = Float32Array.from(new Uint16Array(bytes(edit.expected).buffer), (v) => v === ABSENT ? NaN : v / edit.errorSteps);
    const labels = new Map(), pictures = new Map(), lineChanged = new Uint8Array(S * D), areaChanged = new Uint8Array(D), checked = new Uint8Array(D);
    const counts = Array.from(edit.labels, (runs) => countRuns(runs));
    const state = { active: false, tool: "pull", line: Math.max(0, ilm), area: edit.reported[0] || "", widths: { line: Math.max(3, Math.round(0.4 / edit.mm[2])), area: Math.max(1, Math.round(0.06 / edit.mm[2])) } };
    const history = [];
    let fovea = null; // [B-scan, A-scan] where it was set
    let future = [], stroke = null, saved, waiting = 0, before = null, grid = null, message = "";

    const file = (k) => edit.reversed ? D - 1 - k : k;
    const shown = (f) => volume.kept.indexOf(edit.reversed ? D - 1 - f : f);
    const here = () => file(volume.kept[hooks.at().kept]);
    const line = (s, f) => rows.subarray((s * D + f) * W, (s * D + f + 1) * W);
    const area = () => state.tool === "paint" || state.tool === "erase";
    const width = () => state.widths[area() ? "area" : "line"];
    const same = (a, b) => a.every((v, i) => v === b[i] || (v !== v && b[i] !== b[i]));
    const trusted = (f) => checked[f] || lineChanged[ilm * D + f] || lineChanged[bm * D + f];

    function countRuns(runs) {
      const count = new Float64Array(edit.areas.length);
      for (let i = 0; i < runs.length; i += 3) count[runs[i + 2] - 1] += runs[i + 1];
      return count;
    }

    // uint8 [H * W] of a B-scan: 0, or 1 + index in the areas; from runs of first voxel, count and value, and back.
    function decoded(runs) {
      const own = new Uint8Array(H * W);
      for (let i = 0; i < runs.length; i += 3) own.fill(runs[i + 2], runs[i], runs[i] + runs[i + 1]);
      return own;
    }

    function encoded(own) {
      const runs = [];
      for (let i = 0; i < own.length;) {
        let end = i + 1;
        while (end < own.length && own[end] === own[i]) end++;
        if (own[i]) runs.push(i, end - i, own[i]);
        i = end;
      }
      return runs;
    }

    // Only B-scans whose areas are being changed, or were, keep their voxels: all of a volume would take its size in memory.
    function labelsOf(f) {
      if (!labels.has(f)) labels.set(f, decoded(edit.labels[f]));
      return labels.get(f);
    }

    // ---- changes ----

    function snapshot(f) {
      return { f, lines: Array.from({ length: S }, (_, s) => line(s, f).slice()), labels: area() ? labelsOf(f).slice() : null, checked: checked[f], fovea };
    }

    // The difference to a snapshot, as it goes into the history; null if there is none.
    function difference(old) {
      const change = { f: old.f, lines: [], labels: null, checked: null, fovea: null };
      old.lines.forEach((own, s) => { if (!same(own, line(s, old.f))) change.lines.push([s, own, line(s, old.f).slice()]); });
      if (old.labels && !same(old.labels, labelsOf(old.f))) change.labels = [encoded(old.labels), encoded(labelsOf(old.f))];
      if (old.checked !== checked[old.f]) change.checked = [old.checked, checked[old.f]];
      if (old.fovea !== fovea) change.fovea = [old.fovea, fovea];
      return change.lines.length || change.labels || change.checked || change.fovea ? change : null;
    }

    function refresh(f) {
      for (let s = 0; s < S; s++) lineChanged[s * D + f] = same(line(s, f), found.subarray((s * D + f) * W, (s * D + f + 1) * W)) ? 0 : 1;
      if (labels.has(f)) {
        const own = labels.get(f);
        areaChanged[f] = same(own, decoded(edit.labels[f])) ? 0 : 1;
        counts[f].fill(0);
        for (const value of own) if (value) counts[f][value - 1]++;
        pictures.delete(f);
        if (!areaChanged[f] && !stroke) labels.delete(f);
      }
    }

    function record(olds, text = "") {
      const changes = olds.map(difference).filter(Boolean);
      olds.forEach((old) => refresh(old.f));
      if (changes.length) { history.push(changes); future = []; }
      message = text;
      update();
    }

    function step(from, to, side) {
      const changes = from.pop();
      if (!changes) return;
      for (const { f, lines, labels: areas, checked: mark, fovea: place } of changes) {
        for (const [s, ...pair] of lines) line(s, f).set(pair[side]);
        if (areas) labelsOf(f).set(decoded(areas[side]));
        if (mark) checked[f] = mark[side];
        if (place) fovea = place[side];
        refresh(f);
      }
      to.push(changes);
      message = side ? "Done again." : "Undone.";
      if (changes.length === 1 && shown(changes[0].f) >= 0) hooks.go(shown(changes[0].f));
      update();
    }

    // Set one line in some A-scans; lines that it meets are pushed along, and come back when it does.
    function setLine(old, s, columns, rowOf) {
      for (const x of columns) {
        const value = rowOf(x);
        for (let k = 0; k < S; k++) line(k, old.f)[x] = old.lines[k][x];
        if (value === undefined) continue;
        line(s, old.f)[x] = Number.isNaN(value) ? NaN : kept(clamp(value, 0, H - 1));
        if (Number.isNaN(value)) continue;
        for (const [by, limit] of [[-1, Math.min], [1, Math.max]]) {
          let edge = line(s, old.f)[x];
          for (let k = s + by; k >= 0 && k < S; k += by) {
            const own = old.lines[k][x];
            if (Number.isNaN(own)) continue;
            line(k, old.f)[x] = edge = limit(own, edge);
          }
        }
      }
    }

    const every = (from, to) => { const list = []; for (let x = Math.max(0, from); x <= Math.min(W - 1, to); x++) list.push(x); return list; };
    const bell = (distance, reach) => distance < reach ? 0.5 * (1 + Math.cos(Math.PI * distance / reach)) : 0;

    function pull(old, s, column, by) {
      const reach = width();
      setLine(old, s, every(column - reach, column + reach), (x) => old.lines[s][x] + by * bell(Math.abs(x - column), reach));
    }

    // What was drawn, and a bridge of the brush's width to the line on either side.
    function drawn(old, s, path) {
      const columns = [...path.keys()].sort((a, b) => a - b), first = columns[0], last = columns[columns.length - 1], reach = width();
      const off = (x) => path.get(x) - old.lines[s][x];
      setLine(old, s, every(first - reach, last + reach), (x) => {
        if (path.has(x)) return path.get(x);
        const end = x < first ? first : last, shift = off(end);
        return Number.isNaN(shift) ? undefined : old.lines[s][x] + shift * bell(Math.abs(x - end), reach);
      });
    }

    function dab(f, row, column) {
      const own = labelsOf(f), reach = Math.max(0.5, width() / 2), tall = Math.max(0.5, reach * edit.mm[2] / edit.mm[1]);
      const value = state.tool === "paint" ? 1 + edit.areas.indexOf(state.area) : 0;
      for (let y = Math.max(0, Math.ceil(row - tall)); y <= Math.min(H - 1, Math.floor(row + tall)); y++)
        for (const x of every(Math.ceil(column - reach), Math.floor(column + reach)))
          if (((x - column) / reach) ** 2 + ((y - row) / tall) ** 2 <= 1) own[y * W + x] = value;
      pictures.delete(f);
    }

    // ---- pointer: rows and columns are fractions, pixels is the height of a row ----

    function press(row, column, pixels) {
      if (!state.active) return false;
      const f = here(), x = clamp(Math.round(column), 0, W - 1);
      if (state.tool === "pull") {
        let near = -1, least = NEAR_PX / pixels;
        for (let s = 0; s < S; s++) {
          // The line that is chosen wins where several meet.
          const off = Math.abs(line(s, f)[x] - row) - (s === state.line ? 2 / pixels : 0);
          if (off < least) { least = off; near = s; }
        }
        if (near < 0) return false;
        state.line = near;
      }
      if (area() && !state.area) return false;
      stroke = { old: snapshot(f), row, x, last: [row, column], path: new Map() };
      if (state.tool !== "pull") drag(row, column);
      update();
      return true;
    }

    function drag(row, column) {
      if (!stroke) return false;
      const { old, last } = stroke, [r0, c0] = last, f = old.f;
      if (state.tool === "pull") pull(old, state.line, stroke.x, row - stroke.row);
      else {
        const reach = area() ? Math.max(0.5, width() / 4) : 0.5, parts = Math.max(1, Math.ceil(Math.max(Math.abs(column - c0), area() ? Math.abs(row - r0) * edit.mm[1] / edit.mm[2] : 0) / reach));
        for (let i = 0; i <= parts; i++) {
          const y = r0 + (row - r0) * i / parts, x = c0 + (column - c0) * i / parts;
          if (area()) dab(f, y, x);
          else if (state.tool === "draw") stroke.path.set(clamp(Math.round(x), 0, W - 1), y);
          else for (const gone of every(Math.ceil(x - width() / 2), Math.floor(x + width() / 2))) stroke.path.set(gone, NaN);
        }
        if (state.tool === "draw") drawn(old, state.line, stroke.path);
        else if (state.tool === "remove") setLine(old, state.line, stroke.path.keys(), () => NaN);
      }
      stroke.last = [row, column];
      refresh(f);
      soon();
      return true;
    }

    function release(cancel) {
      if (!stroke) return false;
      const { old } = stroke;
      stroke = null;
      if (cancel) {
        old.lines.forEach((own, s) => line(s, old.f).set(own));
        if (old.labels) { labelsOf(old.f).set(old.labels); pictures.delete(old.f); }
      }
      record([old]);
      hooks.redraw();
      return true;
    }

    // ---- commands ----

    function nudge(by) {
      const old = snapshot(here()), { column, row } = hooks.at();
      // Where there is no line yet, it begins at the cursor.
      if (Number.isNaN(old.lines[state.line][column])) drawn(old, state.line, new Map([[column, row]]));
      else pull(old, state.line, column, by);
      record([old]);
    }

    function stamp() {
      const { row, column } = hooks.at(), old = snapshot(here());
      if (state.tool === "pull") return;
      if (area() && state.area) dab(old.f, row, column);
      else if (state.tool === "draw") drawn(old, state.line, new Map(every(column - Math.floor(width() / 2), column + Math.floor(width() / 2)).map((x) => [x, row])));
      else if (state.tool === "remove") setLine(old, state.line, every(column - Math.floor(width() / 2), column + Math.floor(width() / 2)), () => NaN);
      record([old]);
    }

    function check() {
      const old = snapshot(here());
      checked[old.f] = checked[old.f] ? 0 : 1;
      record([old], checked[old.f] ? "All lines and areas of this B-scan are marked as right." : "The mark is removed.");
    }

    function setFovea(place) {
      if (!grid.zones) { message = "This scan has no zones that a fovea could be the centre of."; update(); return; }
      const old = snapshot(here());
      fovea = place && place.map((at) => Number(at.toFixed(3)));
      record([old], fovea ? `The fovea is set in B-scan ${volumeNumber(Math.round(fovea[0]))}, A-scan ${Math.round(fovea[1]) + 1}; zones lie around it.` : "The fovea is where the pit is found.");
    }

    function revert() {
      const f = here(), old = snapshot(f);
      old.labels ||= labelsOf(f).slice();
      for (let s = 0; s < S; s++) line(s, f).set(found.subarray((s * D + f) * W, (s * D + f + 1) * W));
      labelsOf(f).set(decoded(edit.labels[f]));
      checked[f] = 0;
      record([old], "This B-scan is as the network found it.");
    }

    // The correction of the chosen line, not its rows, which move with the eye, is interpolated between two B-scans.
    function fill() {
      const f = here(), s = state.line, byHand = (d) => lineChanged[s * D + d] || checked[d];
      let a = f, b = f + 1;
      while (a >= 0 && !byHand(a)) a--;
      while (b < D && !byHand(b)) b++;
      if (a < 0 || b >= D || b - a < 2) { message = "Nothing to fill: correct this line in a B-scan before and one after."; update(); return; }
      const places = field ? field.bscans : Array.from({ length: D }, (_, d) => d), olds = [];
      const off = (d, x) => line(s, d)[x] - found[(s * D + d) * W + x];
      for (let d = a + 1; d < b; d++) {
        const old = snapshot(d), share = (places[d] - places[a]) / (places[b] - places[a]);
        setLine(old, s, every(0, W - 1), (x) => {
          const shift = (1 - share) * off(a, x) + share * off(b, x), own = found[(s * D + d) * W + x];
          if (!Number.isNaN(own) && !Number.isNaN(shift)) return own + shift;
          const raw = (1 - share) * line(s, a)[x] + share * line(s, b)[x];
          return Number.isNaN(own) && !Number.isNaN(raw) ? raw : undefined;
        });
        olds.push(old);
      }
      record(olds, `${words(edit.surfaces[s])}: filled in ${many(b - a - 1, "B-scan")} between ${Math.min(volumeNumber(a), volumeNumber(b))} and ${Math.max(volumeNumber(a), volumeNumber(b))}.`);
    }
    const volumeNumber = (f) => (edit.reversed ? D - 1 - f : f) + 1;

    function choose(what) {
      Object.assign(state, what);
      update();
      hooks.redraw();
    }

    // ---- the file ----

    const touched = (f) => checked[f] || areaChanged[f] || edit.surfaces.some((_, s) => lineChanged[s * D + f]);

    function content() {
      const bscans = [];
      for (let f = 0; f < D; f++) {
        if (!touched(f)) continue;
        const one = { bscan: f, checked: Boolean(checked[f]), surfaces: {} };
        edit.surfaces.forEach((name, s) => {
          if (checked[f] || lineChanged[s * D + f]) one.surfaces[name] = Array.from(line(s, f), (row) => Number.isNaN(row) ? null : Number(row.toFixed(3)));
        });
        if (checked[f] || areaChanged[f]) {
          const runs = labels.has(f) ? encoded(labels.get(f)) : edit.labels[f];
          one.areas = {};
          for (let i = 0; i < runs.length; i += 3) (one.areas[edit.areas[runs[i + 2] - 1]] ||= []).push(runs[i], runs[i + 1]);
        }
        bscans.push(one);
      }
      const { format, scan, network, octfm, shape } = edit;
      return { format, scan, network, octfm, author: find("author").value.trim(), participant: find("participant").value.trim(), time: new Date().toISOString(), shape,
        ...(edit.axialLength ? { axial_length_mm: edit.axialLength } : {}), ...(fovea ? { fovea } : {}), bscans };
    }

    function save() {
      if (!find("author").value.trim()) { message = "Enter your name in “Corrected by”, then save."; find("author").focus(); update(); return; }
      const made = content();
      if (!made.bscans.length && !fovea) { message = "Nothing to save: no B-scan was corrected or checked."; update(); return; }
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([JSON.stringify(made)], { type: "application/json" }));
      link.download = `corrections-${edit.scan.slice(0, 8)}.json`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      saved = history[history.length - 1];
      message = `Saved as ${link.download}.`;
      update();
    }

    async function load(chosen) {
      if (!chosen) return;
      let made;
      try { made = JSON.parse(await chosen.text()); } catch { made = null; }
      const isOf = () => made && made.format === edit.format && made.scan === edit.scan && made.network === edit.network && Array.isArray(made.bscans)
        && typeof made.author === "string" && typeof made.time === "string" && (!made.fovea || [D, W].every((n, i) => typeof made.fovea[i] === "number" && made.fovea[i] >= 0 && made.fovea[i] <= n - 1))
        && made.bscans.every((one) => Number.isInteger(one.bscan) && one.bscan >= 0 && one.bscan < D
          && Object.entries(one.surfaces || {}).every(([name, own]) => edit.surfaces.includes(name) && own.length === W)
          && Object.keys(one.areas || {}).every((name) => edit.reported.includes(name)));
      let fits;
      try { fits = isOf(); } catch { fits = false; } // edited by hand
      // Its zones were measured with that length, which would be lost when saved from here.
      const length = fits && made.axial_length_mm, other = length && length !== edit.axialLength;
      if (!fits || other) {
        message = other ? `Not loaded: corrected with an axial length of ${length} mm; make this page with --axial-length ${length}.`
          : `Not loaded: ${made && made.format === edit.format && made.scan !== edit.scan ? "corrections of another scan" : "not corrections of these lines"}.`;
        update();
        return;
      }
      const olds = made.bscans.map(({ bscan: f, checked: mark, surfaces, areas }) => {
        const old = snapshot(f);
        for (const [name, own] of Object.entries(surfaces || {})) line(edit.surfaces.indexOf(name), f).set(own.map((row) => row === null ? NaN : kept(row)));
        if (areas) {
          old.labels ||= labelsOf(f).slice();
          labelsOf(f).fill(0);
          for (const [name, runs] of Object.entries(areas)) for (let i = 0; i < runs.length; i += 2) labelsOf(f).fill(1 + edit.areas.indexOf(name), runs[i], runs[i] + runs[i + 1]);
        }
        checked[f] = mark ? 1 : 0;
        return old;
      });
      if (made.fovea) { olds.push(snapshot(here())); fovea = made.fovea; }
      find("author").value ||= made.author;
      find("participant").value ||= made.participant || "";
      const alone = !history.length;
      record(olds, `Loaded: ${[made.bscans.length && many(made.bscans.length, "B-scan"), made.fovea && "the fovea"].filter(Boolean).join(" and ") || "nothing"} of ${made.author}, ${made.time.slice(0, 10)}.`);
      if (alone) { saved = history[history.length - 1]; status(); } // all of it is in that file
      hooks.redraw();
    }

    // ---- numbers ----

    const map = (upper, lower, own) => {
      const thickness = new Float32Array(D * W), a = upper * D * W, b = lower * D * W, scale = 1000 * edit.mm[1];
      for (let i = 0; i < thickness.length; i++) thickness[i] = (own[b + i] - own[a + i]) * scale;
      return thickness;
    };

    function measured(own, doubt, count, reasons, parts, place) {
      const amounts = reasons.length || parts.length || edit.nlPerVoxel === null ? null : edit.areas.map((_, i) => count.reduce((sum, one, f) => sum + one[i] * edit.nlPerVoxel[f], 0));
      const zones = reasons.length || !field || edit.whyNoZones ? null : octfmEtdrs.measure(map(ilm, bm, own), map(ilm, inner, own), doubt, field, rules, place);
      return { zones, amounts, reasons, parts };
    }

    function measure() {
      before ||= measured(found, expected, edit.labels.map(countRuns), edit.reasons.map((r) => r.text), edit.parts);
      const doubt = expected.slice();
      let all = true;
      for (let f = 0; f < D; f++) if (trusted(f)) doubt.fill(0, f * W, (f + 1) * W); else all = false;
      grid = measured(rows, doubt, counts, edit.reasons.filter((r) => !(all && r.answered)).map((r) => r.text), all ? [] : edit.parts, fovea);
      tell();
      if (grid.zones) drawMap();
    }

    function tell() {
      const table = find("numbers"), body = document.createElement("tbody"), number = (v, digits) => v === null || v === undefined ? "–" : v.toFixed(digits);
      const add = (name, unit, now, was, digits = 1) => {
        const row = document.createElement("tr"), change = now === null || now === undefined || was === null || was === undefined ? NaN : now - was;
        row.dataset.zone = name;
        const cell = (text, tag = "td") => { const one = document.createElement(tag); one.textContent = text; if (tag === "td") one.className = "n"; row.append(one); };
        cell(`${words(name)}, ${unit}`, "th");
        cell(number(now, digits));
        cell(number(was, digits));
        cell(Math.abs(change) >= 0.5 * 10 ** -digits ? `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(digits)}` : "");
        cell(edit.ranges[name] ? edit.ranges[name].map((end) => end.toFixed(0)).join(" to ") : "");
        body.append(row);
      };
      const zones = grid.zones || before.zones;
      if (zones) for (const name of Object.keys(zones.mean)) add(name, "µm", grid.zones?.mean[name], before.zones?.mean[name]);
      if (zones) add("volume within 3 mm of the centre", "mm³", grid.zones?.volume, before.zones?.volume, 3);
      if (grid.amounts) edit.reported.forEach((name) => { const i = edit.areas.indexOf(name); add(name, "nl", grid.amounts[i], before.amounts?.[i]); });
      table.querySelector("tbody").replaceWith(body);
      // Before anything is corrected, "now", "as found" and "change" would repeat each other.
      const changed = history.length > 0;
      table.classList.toggle("unchanged", !changed);
      table.classList.toggle("rangeless", !Object.keys(edit.ranges).length);
      find("now-head").textContent = changed ? "now" : "as found";
      find("numbers-note").textContent = notes().join(" ");
      find("map-pane").hidden = !grid.zones;
      table.hidden = !body.children.length;
    }

    // Why zones or volumes are blank, and what else their reader must know; in the words of octfm.layers.zones.
    function notes() {
      // Not repeated here, because the page begins with it: the verdict as found, and why an accepted scan has no zones.
      const { zones } = grid, said = [], answered = edit.reasons.length > grid.reasons.length;
      if (answered) said.push(grid.reasons.length ? `After correction still: ${grid.reasons.join("; ")}.` : "After correction nothing speaks against it.");
      if (edit.whyNoZones && answered && !grid.reasons.length) said.push(`${edit.whyNoZones[0].toUpperCase()}${edit.whyNoZones.slice(1)}.`);
      if (grid.parts.length) said.push(`${grid.parts.join(", ")}: zones there are blank, and volumes of fluid.`);
      if (!zones) return said;
      if (fovea) said.push("The fovea was set by hand.");
      if (!zones.onPit) said.push("No foveal pit was found, so the grid is centred on the middle of the scan.");
      if (Number.isFinite(zones.rival)) said.push(`The foveal pit could also lie ${zones.rival.toFixed(1)} mm away; zones that this would change are withheld.`);
      const sparse = [...zones.sparse, ...(edit.nlPerVoxel ? [] : ["volumes"])];
      if (sparse.length) said.push(`B-scans ${zones.furthest.toFixed(2)} mm apart are too far apart for: ${sparse.join(", ")}.`);
      if (!fovea) for (const note of edit.unsteady) said.push(`As found, ${note}.`);
      if (!field.upright) said.push("No superior and inferior zones: the file does not say which B-scan is superior.");
      if (rules.sides[0] === "right") said.push("Left and right instead of nasal and temporal: the file does not say which eye it is.");
      const short = Object.keys(zones.coverage).filter((name) => !(zones.coverage[name] >= rules.covered));
      if (short.length) said.push(`Less than ${Math.round(100 * rules.covered)}% measured: ${short.join(", ")}.`);
      if (zones.withheld.length) said.push(`Withheld (network unsure there, or the fovea may lie elsewhere): ${zones.withheld.join(", ")}.`);
      if (Object.keys(edit.ranges).length) said.push(`In the last column: ${edit.rangeKind}; it promises nothing for real eyes.`);
      return said;
    }

    // What the colours of the map stand for.
    function mapScale() {
      const bar = Object.assign(document.createElement("span"), { className: "scale", role: "img", ariaLabel: "to" }), [low, high] = edit.range;
      bar.style.background = `linear-gradient(to right, ${edit.viridis.filter((_, i) => i % 7 === 0).map((c) => `rgb(${c})`).join(", ")})`;
      find("map-scale").replaceChildren(`${low}`, bar, `${high} µm`);
    }

    function drawMap() {
      const canvas = find("map"), context = canvas.getContext("2d"), half = MAP_MM, step = 0.04, n = Math.round(2 * half / step), [a, b, c] = rules.rings;
      const axis = Array.from({ length: n }, (_, i) => -half + (i + 0.5) * step), [cx, cy] = grid.zones.centre;
      const values = octfmEtdrs.sample(map(ilm, bm, rows), field, axis.map((v) => cx + v), axis.map((v) => cy + v), rules);
      const rgba = new Uint8ClampedArray(4 * n * n), [low, high] = edit.range, size = canvas.width, at = (mm) => (mm + half) / (2 * half) * size;
      values.forEach((v, i) => { if (v === v) rgba.set([...edit.viridis[Math.round(clamp((v - low) / (high - low), 0, 1) * 63)], 255], 4 * i); });
      const small = document.createElement("canvas");
      small.width = small.height = n;
      small.getContext("2d").putImageData(new ImageData(rgba, n, n), 0, 0);
      context.fillStyle = "#000";
      context.fillRect(0, 0, size, size);
      context.drawImage(small, 0, 0, size, size);
      context.strokeStyle = "#fff";
      context.lineWidth = 1.5;
      context.beginPath();
      for (const r of [a, b, c]) { context.moveTo(at(r), at(0)); context.arc(at(0), at(0), r / (2 * half) * size, 0, 2 * Math.PI); }
      for (const [sx, sy] of [[1, 1], [1, -1], [-1, 1], [-1, -1]]) { context.moveTo(at(sx * a / Math.SQRT2), at(sy * a / Math.SQRT2)); context.lineTo(at(sx * c / Math.SQRT2), at(sy * c / Math.SQRT2)); }
      context.stroke();
      const [right, left] = rules.sides, places = { superior: [0, -1], inferior: [0, 1], [right]: [1, 0], [left]: [-1, 0] };
      const write = (text, x, y, px) => {
        Object.assign(context, { font: `${px}px system-ui, sans-serif`, textAlign: "center", textBaseline: "middle", lineWidth: 3, strokeStyle: "rgba(0,0,0,.8)", fillStyle: "#fff" });
        context.strokeText(text, x, y);
        context.fillText(text, x, y);
      };
      for (const [name, mean] of Object.entries(grid.zones.mean)) {
        const [ring, side] = name.split(" "), r = ring === "inner" ? (a + b) / 2 : ring === "outer" ? (b + c) / 2 : 0, [dx, dy] = places[side] || [0, 0];
        write(mean === null ? "–" : mean.toFixed(0), at(r * dx), at(r * dy), size / 20);
      }
      for (const [side, [dx, dy]] of Object.entries(places)) if (field.upright || !dy) write(side[0].toUpperCase(), at(3.2 * dx), at(3.2 * dy), size / 28);
      canvas.setAttribute("aria-label", `Map of retinal thickness, ILM to BM, from ${low} to ${high} µm, with the ETDRS grid; the table has its means.`);
    }

    function soon() {
      hooks.redraw();
      if (!waiting) waiting = setTimeout(() => { waiting = 0; measure(); status(); }, 30);
    }

    function status() {
      const lines = lineChanged.reduce((a, b) => a + b, 0), areas = areaChanged.reduce((a, b) => a + b, 0), marks = checked.reduce((a, b) => a + b, 0);
      const parts = [lines && `${many(lines, "line")} changed`, areas && `areas of ${many(areas, "B-scan")} changed`, marks && `${many(marks, "B-scan")} marked as right`, fovea && "fovea set", dirty() && "not saved"].filter(Boolean);
      const text = [message, parts.length ? `${parts.join(", ")}.` : state.active ? "Nothing changed yet." : ""].filter(Boolean).join(" ");
      if (find("hand-status").textContent !== text) find("hand-status").textContent = text;
      Object.assign(root.dataset, { hand: state.active ? state.tool : "", line: edit.surfaces[state.line], changed: lines + areas, checked: marks, fovea: fovea || "", undo: history.length, redo: future.length });
    }
    const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
    const dirty = () => history[history.length - 1] !== saved;

    function update() {
      find("hand").hidden = !state.active;
      find("hand-on").setAttribute("aria-pressed", state.active);
      find("hand-on").textContent = state.active ? "Stop correcting (E)" : "Correct by hand (E)";
      find("tool").value = state.tool;
      find("line").value = state.line;
      find("area").value = state.area;
      find("brush").value = width();
      find("brush-width").textContent = `${width()} A-scan${width() === 1 ? "" : "s"}, ${(width() * edit.mm[2]).toFixed(2)} mm`;
      find("check").setAttribute("aria-pressed", Boolean(checked[here()]));
      find("undo").disabled = !history.length;
      find("redo").disabled = !future.length;
      for (const part of ["bscan", "map"]) find(part).classList.toggle("correcting", state.active);
      if (waiting) { clearTimeout(waiting); waiting = 0; }
      measure();
      status();
    }

    // What depends on the B-scan that is shown.
    function moved() {
      find("check").setAttribute("aria-pressed", Boolean(checked[here()]));
      if (message && !stroke) { message = ""; status(); }
    }

    // ---- drawing ----

    function drawLines(context, overlay, canvasWidth, canvasHeight) {
      const f = here();
      for (let s = 0; s < S; s++) {
        const chosen = state.active && !area() && s === state.line, own = line(s, f);
        context.strokeStyle = `rgb(${overlay.legend[s].colour})`;
        context.lineWidth = Math.max(1.2, canvasWidth / 500) * (chosen ? 2 : 1);
        context.beginPath();
        let pen = false;
        for (let x = 0; x < W; x++) {
          if (Number.isNaN(own[x])) { pen = false; continue; }
          const px = (x + 0.5) / W * canvasWidth, py = (own[x] + 0.5) / H * canvasHeight;
          pen ? context.lineTo(px, py) : context.moveTo(px, py);
          pen = true;
        }
        context.stroke();
      }
    }

    function drawAreas(context, overlay, canvasWidth, canvasHeight) {
      const f = here();
      if (!pictures.has(f)) {
        const own = labels.get(f) || decoded(edit.labels[f]);
        if (pictures.size > 8) pictures.clear();
        const rgba = new Uint8ClampedArray(4 * H * W), picture = document.createElement("canvas");
        const colours = edit.areas.map((name) => overlay.legend.find((entry) => entry.name === words(name))?.colour || [255, 255, 255]);
        for (let i = 0; i < own.length; i++) if (own[i]) rgba.set([...colours[own[i] - 1], 255], 4 * i);
        picture.width = W;
        picture.height = H;
        picture.getContext("2d").putImageData(new ImageData(rgba, W, H), 0, 0);
        pictures.set(f, picture);
      }
      context.imageSmoothingEnabled = false;
      context.drawImage(pictures.get(f), 0, 0, canvasWidth, canvasHeight);
    }

    // How far the brush reaches, at the cursor.
    function drawBrush(context, canvasWidth, canvasHeight) {
      if (!state.active) return;
      const { row, column } = hooks.at(), x = (column + 0.5) / W * canvasWidth, y = (row + 0.5) / H * canvasHeight, reach = width() * (area() || state.tool === "remove" ? 0.5 : 1) / W * canvasWidth;
      context.strokeStyle = "rgba(255,255,255,.8)";
      context.lineWidth = 1.5;
      context.beginPath();
      if (area()) context.ellipse(x, y, reach, width() / 2 * edit.mm[2] / edit.mm[1] / H * canvasHeight, 0, 0, 2 * Math.PI);
      else for (const side of [-1, 1]) { context.moveTo(x + side * reach, y - 12); context.lineTo(x + side * reach, y + 12); }
      context.stroke();
    }

    // Below the B-scan in which the grid is centred.
    function drawFovea(context, canvasWidth, canvasHeight) {
      if (!state.active || !grid.zones) return;
      const [bscan, ascan] = octfmEtdrs.indexOf(grid.zones.centre, field), x = (ascan + 0.5) / W * canvasWidth;
      if (Math.round(bscan) !== here()) return;
      // The outline is for white margins.
      Object.assign(context, { fillStyle: "#fff", strokeStyle: "#000", lineWidth: 2 });
      context.beginPath();
      context.moveTo(x, canvasHeight - 16);
      for (const side of [-8, 8]) context.lineTo(x + side, canvasHeight - 1);
      context.closePath();
      context.fill();
      context.stroke();
    }

    // ---- keys ----

    function toggle() {
      if (state.active) release(true);
      choose({ active: !state.active });
      if (state.active) hooks.on();
    }
    const widen = (by) => { const key = area() ? "area" : "line"; state.widths[key] = clamp(state.widths[key] + by * Math.max(1, Math.round(state.widths[key] / 5)), 1, W); choose({}); };
    const keys = {
      l: (e) => choose({ line: (state.line + (e.shiftKey ? S - 1 : 1)) % S, tool: area() ? "pull" : state.tool }),
      t: (e) => choose({ tool: TOOLS[(TOOLS.indexOf(state.tool) + (e.shiftKey ? TOOLS.length - 1 : 1)) % TOOLS.length] }),
      u: (e) => nudge(e.shiftKey ? -5 : -0.5), d: (e) => nudge(e.shiftKey ? 5 : 0.5),
      b: (e) => widen(e.shiftKey ? -1 : 1), k: check, f: (e) => setFovea(e.shiftKey ? null : [here(), clamp(hooks.at().column, 0, W - 1)]), r: revert, i: fill, Enter: stamp,
      z: (e) => e.shiftKey ? step(future, history, 1) : step(history, future, 0), y: () => step(future, history, 1),
      Escape: () => release(true),
    };

    // Whether a key was for this.
    function key(event) {
      const name = event.key.length === 1 ? event.key.toLowerCase() : event.key, control = event.ctrlKey || event.metaKey;
      if (event.altKey || (control && !(state.active && "zys".includes(name)))) return false;
      if (control && name === "s") { event.preventDefault(); save(); return true; }
      if (name === "e" && !control) { event.preventDefault(); toggle(); return true; }
      // During a stroke, other keys would change what it is compared with, or leave its B-scan.
      if (stroke && name !== "Escape") { event.preventDefault(); return true; }
      if (!state.active || !keys[name] || (name === "Enter" && ["BUTTON", "SUMMARY"].includes(event.target.tagName))) return false;
      event.preventDefault();
      keys[name](event);
      hooks.redraw();
      return true;
    }

    for (const [part, options] of [["line", edit.surfaces.map((name, s) => [s, words(name)])], ["area", edit.reported.map((name) => [name, words(name)])]])
      find(part).replaceChildren(...options.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
    find("area-pane").hidden = !edit.reported.length;
    mapScale();
    for (const option of find("tool").options) if (["paint", "erase"].includes(option.value)) option.disabled = !edit.reported.length;
    find("brush").max = Math.min(W, 400);
    const listen = (part, kind, action) => find(part).addEventListener(kind, action);
    listen("hand-on", "click", toggle);
    listen("tool", "change", (e) => choose({ tool: e.target.value }));
    listen("line", "change", (e) => choose({ line: Number(e.target.value), tool: area() ? "pull" : state.tool }));
    listen("area", "change", (e) => choose({ area: e.target.value, tool: area() ? state.tool : "paint" }));
    listen("brush", "input", (e) => { state.widths[area() ? "area" : "line"] = Number(e.target.value); choose({}); });
    for (const [part, action] of Object.entries({ undo: () => step(history, future, 0), redo: () => step(future, history, 1), check, revert, fill, save, fovea: () => keys.f({}) }))
      listen(part, "click", () => { action(); hooks.redraw(); });
    // A click on the map: the grid is centred there, and its B-scan is shown.
    listen("map", "click", (e) => {
      if (!state.active || !grid.zones) return;
      const box = e.target.getBoundingClientRect(), mm = (at, size) => 2 * MAP_MM * (at / size - 0.5), [cx, cy] = grid.zones.centre;
      const place = octfmEtdrs.indexOf([cx + mm(e.clientX - box.left, box.width), cy + mm(e.clientY - box.top, box.height)], field), there = shown(Math.round(place[0]));
      if (there >= 0) hooks.go(there);
      setFovea(place);
      hooks.redraw();
    });
    listen("load", "change", (e) => load(e.target.files[0]).finally(() => { e.target.value = ""; }));
    window.addEventListener("beforeunload", (e) => { if (dirty()) e.preventDefault(); });

    return { press, drag, release, key, moved, update, drawLines, drawAreas, drawBrush, drawFovea, active: () => state.active, drawing: () => Boolean(stroke) };
  }

  return { open };
})();
