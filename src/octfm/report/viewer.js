// Scrubs through OCT volumes: B-scan and view from the front with one cursor, overlays, distances. No dependencies, no network.
// What follows from clicks, keys and the wheel; viewer_paint.js, which comes first, knows how it is drawn.
"use strict";
(() => {
  const { NONE, bytes, clamp, tokenSlice, tokenAt, voxelOf, decodeTokens, paint, sliceCanvas, frontCanvas, place, drawLines, drawArea,
    drawSides, drawBars, cross, mark } = octfmPaint;
  // A B-scan lower than this is stretched at first: on a phone a retina in true proportions is ten pixels high.
  const LOW_PX = 100;
  const unknown = ([x, y]) => x === -1 && y === -1;  // as octfm.report.viewer codes a line without a place
  const mm = (value) => `${value.toFixed(3)} mm`;

  // ---- one viewer on the page ----

  function start(root, data) {
    const find = (name) => root.querySelector(`[data-part="${name}"]`);
    const bscanCanvas = find("bscan"), frontCanvasElement = find("enface"), slider = find("slider"), fundusCanvas = find("fundus");
    const state = { volume: 0, kept: 0, row: 0, column: 0, on: new Set(), opacity: 0.5, stretch: 0, cursor: true, anchor: null, query: null };
    const volumes = data.volumes;
    let volume, images = {}, drawn = -1, wheel = 0, spoken = 0, hand = null;
    const corrected = (overlay) => hand && (overlay.key === "segmentation" || overlay.key === "lesions");

    const bscan = () => volume.kept[state.kept];
    const overlays = () => volume.overlays;

    function choose(index) {
      const before = volume && [state.kept / Math.max(1, volume.kept.length - 1), state.row / volume.shape[1], state.column / volume.shape[2]];
      const names = new Set(volume ? [...state.on].map((i) => overlays()[i].key) : data.on);
      state.volume = index;
      volume = volumes[index];
      images = volume.pictures ||= {};
      find("stretch").options[0].text = `1 × (${volume.hasMm ? "true" : "estimated"} proportions)`;
      if (volume.features && !overlays().some((o) => o.key === "similarity"))
        overlays().push({ key: "similarity", name: "Similarity to a clicked token", kind: "scalar", about: volume.aboutFeatures, unit: "", low: 0, high: 1,
          values: new Float32Array(volume.grid[0] * volume.grid[1] * volume.grid[2]).fill(NaN) });
      state.on = new Set(overlays().flatMap((o, i) => names.has(o.key) ? [i] : []));
      const at = before || [0.5, 0.5, 0.5];
      state.kept = Math.round(at[0] * (volume.kept.length - 1));
      state.row = clamp(Math.floor(at[1] * volume.shape[1]), 0, volume.shape[1] - 1);
      state.column = clamp(Math.floor(at[2] * volume.shape[2]), 0, volume.shape[2] - 1);
      state.anchor = null;
      hand = !volume.correct ? null : volume.hand ||= octfmCorrect.open(root, volume, {
        redraw: draw, at: () => state, go: (kept) => { state.kept = kept; draw(); },
        on: () => {
          overlays().forEach((o, i) => { if (corrected(o) && !state.on.has(i)) toggle(i); });
          if (state.stretch === 1) stretch(3);  // a row is hardly half a pixel high in true proportions
        },
      });
      slider.max = volume.kept.length - 1;
      find("volume").value = index;
      find("front-pane").hidden = !volume.front;
      find("fundus-pane").hidden = !volume.fundus;
      find("side").hidden = !volume.front && !volume.fundus;
      find("front-about").textContent = volume.frontAbout;
      find("note").textContent = volume.note;
      find("eye").textContent = volume.eye;
      listOverlays();
      if (state.query) compare();
      layout();
      hand?.update();
    }

    function listOverlays() {
      const list = find("overlays");
      list.replaceChildren();
      overlays().forEach((overlay, i) => {
        const label = document.createElement("label"), box = document.createElement("input");
        box.type = "checkbox";
        box.checked = state.on.has(i);
        box.dataset.overlay = overlay.key;
        box.addEventListener("change", () => toggle(i));
        label.append(box, ` ${i < 9 ? `${i + 1} ` : ""}${overlay.name}`);
        for (const entry of overlay.legend || []) {
          const swatch = document.createElement("span"), together = document.createElement("span");
          swatch.className = "swatch";
          swatch.style.background = `rgb(${entry.colour})`;
          together.className = "entry";
          together.append(swatch, `\u00a0${entry.name}`);
          label.append(" ", together);
        }
        if (overlay.kind === "scalar") label.append(" ", scale(overlay));
        list.append(label);
      });
      find("overlays-pane").hidden = !overlays().length;
    }

    // What its colours stand for.
    function scale(overlay) {
      const two = overlay.low < 0, stops = data.colourMaps[two ? "diverging" : "sequential"],
        bar = Object.assign(document.createElement("span"), { className: "scale", role: "img", ariaLabel: "to" });
      bar.style.background = `linear-gradient(to right, ${stops.filter((_, i) => i % 7 === 0).map((c) => `rgb(${c})`).join(", ")})`;
      const around = Object.assign(document.createElement("span"), { className: "entry" });
      around.append(overlay.low.toPrecision(2), bar, overlay.high.toPrecision(2));
      return around;
    }

    function toggle(i) {
      if (i >= overlays().length) return;
      state.on.has(i) ? state.on.delete(i) : state.on.add(i);
      const boxes = find("overlays").querySelectorAll("input");
      boxes[i].checked = state.on.has(i);
      if (overlays()[i].key === "similarity" && state.on.has(i) && !state.query) ask();
      draw();
    }

    // ---- similarity ----

    function featuresOf(v) {
      v.vectors ||= new Int8Array(bytes(v.features).buffer);
      return v.vectors;
    }

    function ask() {
      const token = volume.features ? tokenAt(volume, bscan(), state.row, state.column) : -1;
      if (token < 0) return;
      const size = volume.directions, vector = Float32Array.from(featuresOf(volume).subarray(token * size, (token + 1) * size));
      state.query = { vector, said: `${volume.title}, B-scan ${bscan() + 1}` };
      compare();
      draw();
    }

    // Cosine of the query with every token that has features.
    function compare() {
      const overlay = overlays().find((o) => o.key === "similarity");
      if (!overlay || volume.directions !== state.query.vector.length) return;
      const size = volume.directions, all = featuresOf(volume), query = state.query.vector, own = Math.hypot(...query) || 1;
      for (let t = 0; t < overlay.values.length; t++) {
        if (volume.tissueTokens && !volume.tissueTokens[t]) { overlay.values[t] = NaN; continue; }
        let dot = 0, norm = 0;
        for (let k = 0; k < size; k++) { const v = all[t * size + k]; dot += v * query[k]; norm += v * v; }
        overlay.values[t] = norm ? dot / (own * Math.sqrt(norm)) : 0;
      }
      overlay.rgba ||= new Uint8ClampedArray(4 * overlay.values.length);
      paint(overlay, data.colourMaps);
    }

    function jump() {
      const overlay = overlays().find((o) => o.key === "similarity");
      if (!overlay || !state.query) return;
      let best = -1;
      overlay.values.forEach((v, t) => { if (!Number.isNaN(v) && (best < 0 || v > overlay.values[best])) best = t; });
      if (best < 0) return;
      const [z, y, x] = voxelOf(volume, best);
      state.kept = nearestKept(z);
      state.row = clamp(y, 0, volume.shape[1] - 1);
      state.column = clamp(x, 0, volume.shape[2] - 1);
      draw();
    }

    // ---- drawing ----

    function nearestKept(index) {
      let best = 0;
      volume.kept.forEach((k, i) => { if (Math.abs(k - index) < Math.abs(volume.kept[best] - index)) best = i; });
      return best;
    }

    function picture(i) {
      if (i < 0 || i >= volume.kept.length) return null;
      if (!images[i]) {
        const image = new Image(), own = images;
        image.addEventListener("load", () => { image.ready = true; if (own === images && i === state.kept) draw(); });
        image.src = `data:image/jpeg;base64,${volume.bscans[i]}`;
        images[i] = image;
      }
      return images[i];
    }

    // Canvases have square millimetres, times the axial stretch.
    function layout() {
      const [D, H, W] = volume.shape, [dz, dy, dx] = volume.shownMm, wide = bscanCanvas.parentElement.clientWidth;
      if (!state.stretch && wide) find("stretch").value = state.stretch = [1, 2].find((by) => wide / (W * dx) * H * dy * by >= LOW_PX) || 3;
      const fit = (canvas, width, height) => {
        const room = canvas.parentElement.clientWidth;
        if (!room) return;
        const shown = Math.min(room, 0.8 * window.innerHeight * width / height), dpr = window.devicePixelRatio || 1;
        canvas.style.width = `${shown}px`;
        canvas.style.height = `${shown * height / width}px`;
        canvas.width = Math.max(1, Math.round(shown * dpr));
        canvas.height = Math.max(1, Math.round(shown * height / width * dpr));
      };
      fit(bscanCanvas, W * dx, H * dy * (state.stretch || 1));
      if (volume.front) fit(frontCanvasElement, W * dx, D * dz);
      if (volume.fundus) fit(fundusCanvas, ...volume.fundus.size);
      draw();
    }

    function draw() {
      drawBscan();
      if (volume.front) drawFront();
      if (volume.fundus) drawFundus();
      slider.value = state.kept;
      slider.setAttribute("aria-valuetext", `B-scan ${bscan() + 1} of ${volume.shape[0]}`);
      find("number").textContent = `${bscan() + 1} of ${volume.shape[0]}`;
      find("readout").textContent = readout();
      const saying = new Map();
      for (const o of [...state.on].sort().map((i) => overlays()[i])) if (o.about) saying.set(o.about, [...saying.get(o.about) || [], o.name]);
      const about = [...saying].map(([text, names]) => `${names.join("; ")}: ${text}`);
      if (find("about").dataset.said !== about.join("\n")) {
        find("about").dataset.said = about.join("\n");
        find("about").replaceChildren(...about.map((text) => Object.assign(document.createElement("p"), { className: "soft", textContent: text })));
      }
      clearTimeout(spoken);
      spoken = setTimeout(() => { find("spoken").textContent = readout(); }, 700);
      Object.assign(root.dataset, { volume: state.volume, bscan: bscan(), row: state.row, column: state.column, drawn,
        overlays: [...state.on].map((i) => overlays()[i].key).join(" ") });
      picture(state.kept + 1);
      picture(state.kept - 1);
    }

    function drawBscan() {
      const context = bscanCanvas.getContext("2d"), { width, height } = bscanCanvas, [, H, W] = volume.shape, k = bscan();
      const image = picture(state.kept);
      if (image.ready) {
        context.imageSmoothingEnabled = true;
        context.drawImage(image, 0, 0, width, height);
        drawn = k;
      } else {
        context.fillStyle = "#000";
        context.fillRect(0, 0, width, height);
        drawn = -1;
      }
      for (const i of state.on) {
        const overlay = overlays()[i];
        context.globalAlpha = overlay.kind === "lines" ? 1 : state.opacity;
        context.imageSmoothingEnabled = false;
        if (corrected(overlay)) overlay.kind === "lines" ? hand.drawLines(context, overlay, width, height) : hand.drawAreas(context, overlay, width, height);
        else if (overlay.kind === "lines") drawLines(context, volume, overlay, state.kept, width, height);
        else if (overlay.kind === "voxels") drawArea(context, overlay, state.kept, width, height, (kept) => { if (kept === state.kept) draw(); });
        else {
          const d = tokenSlice(volume, k);
          if (d < 0) continue;
          decodeTokens(overlay, volume.grid[0] * volume.grid[1] * volume.grid[2], data.colourMaps);
          const [left, right] = volume.placement.columns, [top, bottom] = volume.placement.rows[k];
          place(context, sliceCanvas(overlay, volume, d), left / W * width, right / W * width, top / H * height, bottom / H * height);
        }
      }
      context.globalAlpha = 1;
      drawSides(context, width, height, volume.sides);
      if (volume.hasMm) drawBars(context, width, height, volume.shownMm[2] * W, state.stretch <= 1 ? 0 : volume.shownMm[1] * H);
      if (state.cursor && !hand?.active()) cross(context, (state.column + 0.5) / W * width, (state.row + 0.5) / H * height, width, height);
      hand?.drawBrush(context, width, height);
      hand?.drawFovea(context, width, height);
      if (state.anchor) mark(context, (state.anchor[2] + 0.5) / W * width, (state.anchor[1] + 0.5) / H * height, state.anchor[0] === k);
    }

    function drawFront() {
      const canvas = frontCanvasElement, context = canvas.getContext("2d"), { width, height } = canvas, [D, , W] = volume.shape;
      if (!volume.frontImage) {
        const image = new Image(), own = volume;
        image.addEventListener("load", () => { image.ready = true; if (own === volume) draw(); });
        image.src = `data:image/png;base64,${volume.front}`;
        volume.frontImage = image;
      }
      root.dataset.front = volume.frontImage.ready ? "drawn" : "";
      if (volume.frontImage.ready) context.drawImage(volume.frontImage, 0, 0, width, height);
      for (const i of state.on) {
        const overlay = overlays()[i];
        if (overlay.kind === "lines" || overlay.kind === "voxels") continue;
        decodeTokens(overlay, volume.grid[0] * volume.grid[1] * volume.grid[2], data.colourMaps);
        const [left, right] = volume.placement.columns, [from, to] = volume.placement.bscans;
        context.globalAlpha = state.opacity;
        context.imageSmoothingEnabled = false;
        place(context, frontCanvas(overlay, volume), left / W * width, right / W * width, from / D * height, to / D * height);
        context.globalAlpha = 1;
        context.imageSmoothingEnabled = true;
      }
      drawSides(context, width, height, volume.sides, volume.vertical);
      if (volume.hasMm) drawBars(context, width, height, volume.shownMm[2] * W, 0);
      const x = (state.column + 0.5) / W * width, y = (bscan() + 0.5) / D * height;
      if (state.cursor) cross(context, x, y, width, height);
      if (state.anchor) mark(context, (state.anchor[2] + 0.5) / W * width, (state.anchor[0] + 0.5) / D * height, true);
    }

    function drawFundus() {
      const fundus = volume.fundus, context = fundusCanvas.getContext("2d"), { width, height } = fundusCanvas, own = volume;
      if (!fundus.picture) {
        fundus.picture = new Image();
        fundus.picture.addEventListener("load", () => { fundus.picture.ready = true; if (own === volume) draw(); });
        fundus.picture.src = `data:image/jpeg;base64,${fundus.image}`;
      }
      root.dataset.fundus = fundus.picture.ready ? "drawn" : "";
      if (fundus.picture.ready) context.drawImage(fundus.picture, 0, 0, width, height);
      const stroke = ([x0, y0, x1, y1], colour, thick) => {
        if (unknown([x0, y0])) return;
        context.strokeStyle = colour;
        context.lineWidth = thick * (window.devicePixelRatio || 1);
        context.beginPath();
        context.moveTo(x0 * width, y0 * height);
        context.lineTo(x1 * width, y1 * height);
        context.stroke();
      };
      find("fundus-about").textContent = `${fundus.about}. ${placeOn(fundus.lines?.[bscan()])}`;
      for (const line of fundus.lines || []) stroke(line, "rgba(86, 180, 233, .25)", 1);
      if (fundus.lines) stroke(fundus.lines[bscan()], "rgb(240, 228, 66)", 2);
    }

    // ---- words ----

    // Describe the line [x0, y0, x1, y1] of a B-scan on the fundus, in shares of the picture.
    function placeOn(line) {
      if (!line) return "Where the B-scans lie on it is not known.";
      if (unknown(line)) return "Where this B-scan lies on it is not known.";
      const [x0, y0, x1, y1] = line, beyond = (a, b) => Math.max(a, b) < 0 || Math.min(a, b) > 1;
      return beyond(x0, x1) || beyond(y0, y1) ? "This B-scan lies outside the picture." : "The bright line is the B-scan.";
    }

    function readout() {
      const [dz, dy, dx] = volume.mm, k = bscan();
      const where = [`B-scan ${k + 1} of ${volume.shape[0]}`, `A-scan ${state.column + 1} of ${volume.shape[2]}`, `row ${state.row + 1}`];
      const parts = [where.join(", ")];
      if (volume.hasMm) {
        const across = volume.front ? `, ${mm(k * dz)} from the first B-scan` : "";
        parts.push(`${mm(state.column * dx)} from the left, ${mm(state.row * dy)} below the top${across}`);
      }
      if (state.anchor && volume.hasMm) {
        const [a, b, c] = [(k - state.anchor[0]) * dz, (state.row - state.anchor[1]) * dy, (state.column - state.anchor[2]) * dx];
        if (volume.front) parts.push(`from the anchor: ${mm(Math.hypot(a, b, c))} (${mm(Math.abs(c))} along, ${mm(Math.abs(b))} deep, ${mm(Math.abs(a))} across B-scans)`);
        else if (!a) parts.push(`from the anchor: ${mm(Math.hypot(b, c))} (${mm(Math.abs(c))} along, ${mm(Math.abs(b))} deep)`);
      }
      const token = tokenAt(volume, k, state.row, state.column);
      for (const i of state.on) {
        const overlay = overlays()[i];
        if (overlay.kind === "scalar" && overlay.rgba && token >= 0 && !Number.isNaN(overlay.values[token]))
          parts.push(`${overlay.name}: ${overlay.values[token].toFixed(3)}${overlay.unit ? ` ${overlay.unit}` : ""}`);
        if (overlay.kind === "classes" && overlay.classes && token >= 0)
          parts.push(`${overlay.name}: ${overlay.classes[token] === NONE ? "neither" : overlay.legend[overlay.classes[token]].name}`);
      }
      if (state.query && [...state.on].some((i) => overlays()[i].key === "similarity")) parts.push(`compared with a token of ${state.query.said}`);
      return `${parts.join("; ")}.`;
    }

    // ---- hands ----

    function step(by) { state.kept = clamp(state.kept + by, 0, volume.kept.length - 1); draw(); hand?.moved(); }
    function move(rows, columns) {
      state.row = clamp(state.row + rows, 0, volume.shape[1] - 1);
      state.column = clamp(state.column + columns, 0, volume.shape[2] - 1);
      draw();
    }
    function fade(by) { state.opacity = clamp(Math.round(10 * (state.opacity + by)) / 10, 0, 1); find("opacity").value = state.opacity; draw(); }
    function drop() { state.anchor = state.anchor ? null : [bscan(), state.row, state.column]; draw(); }
    function stretch(to) { state.stretch = to; find("stretch").value = to; layout(); }

    const page = () => Math.max(2, Math.round(volume.kept.length / 10));
    const keys = {
      ArrowUp: (e) => e.shiftKey ? move(-1, 0) : step(-1), ArrowDown: (e) => e.shiftKey ? move(1, 0) : step(1),
      ArrowLeft: (e) => e.target === slider ? step(-1) : move(0, e.shiftKey ? -10 : -1),
      ArrowRight: (e) => e.target === slider ? step(1) : move(0, e.shiftKey ? 10 : 1),
      PageUp: () => step(-page()), PageDown: () => step(page()), Home: () => step(-1e9), End: () => step(1e9),
      0: () => { state.on.clear(); listOverlays(); draw(); },
      a: drop, c: () => { state.cursor = !state.cursor; draw(); }, s: ask, j: jump,
      x: () => stretch(state.stretch % 3 + 1), v: () => choose((state.volume + 1) % volumes.length),
      "[": () => fade(-0.1), "]": () => fade(0.1), "-": () => fade(-0.1), "+": () => fade(0.1),
    };
    root.addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s" && hand?.key(event)) return;
      if (event.target.tagName === "INPUT" && event.target.type !== "checkbox" && event.target !== slider && event.target !== find("opacity")) return;
      if (event.target.matches(".scroll") && event.target.scrollWidth > event.target.clientWidth && /^Arrow[LR]/.test(event.key)) return; // scrolls a wide table
      if (event.target.tagName !== "SELECT" && hand?.key(event)) return;
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT" || event.target === find("opacity")) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      const action = /^[1-9]$/.test(key) ? () => toggle(Number(key) - 1) : keys[key];
      if (!action) return;
      event.preventDefault();
      action(event);
    });

    function drag(canvas, take) {
      canvas.addEventListener("pointerdown", (event) => { if (event.button || !event.isPrimary) return; canvas.setPointerCapture(event.pointerId); take(event, true); });
      canvas.addEventListener("pointermove", (event) => { if (event.isPrimary && event.buttons & 1) take(event, false); });
    }
    const at = (canvas, event, rows, columns) => {
      const box = canvas.getBoundingClientRect();
      return [Math.floor(clamp((event.clientY - box.top) / box.height, 0, 0.999999) * rows), Math.floor(clamp((event.clientX - box.left) / box.width, 0, 0.999999) * columns)];
    };
    drag(bscanCanvas, (event, down) => {
      const box = bscanCanvas.getBoundingClientRect(), pixels = box.height / volume.shape[1];
      const taken = hand && (down ? (a, b) => hand.press(a, b, pixels) : hand.drag)((event.clientY - box.top) / pixels - 0.5, (event.clientX - box.left) / box.width * volume.shape[2] - 0.5);
      [state.row, state.column] = at(bscanCanvas, event, volume.shape[1], volume.shape[2]);
      if (down && !taken && [...state.on].some((i) => overlays()[i].key === "similarity")) ask();
      draw();
    });
    for (const end of ["pointerup", "pointercancel"]) bscanCanvas.addEventListener(end, (event) => { if (event.isPrimary) hand?.release(end === "pointercancel"); });
    drag(frontCanvasElement, (event) => {
      const [k, column] = at(frontCanvasElement, event, volume.shape[0], volume.shape[2]);
      state.kept = nearestKept(k);
      state.column = column;
      draw();
      hand?.moved();
    });
    for (const canvas of [bscanCanvas, frontCanvasElement])
      canvas.addEventListener("wheel", (event) => {
        // Without the focus the wheel scrolls the page.
        if (event.ctrlKey || !root.contains(document.activeElement)) return;
        event.preventDefault();
        if (hand?.drawing()) return;
        wheel += event.deltaMode ? 40 * event.deltaY : event.deltaY;
        const steps = Math.trunc(wheel / 40);
        if (steps) { wheel -= 40 * steps; step(steps); }
      }, { passive: false });

    slider.addEventListener("input", () => { state.kept = Number(slider.value); draw(); hand?.moved(); });
    find("opacity").addEventListener("input", (event) => { state.opacity = Number(event.target.value); draw(); });
    find("stretch").addEventListener("change", (event) => stretch(Number(event.target.value)));
    find("volume").addEventListener("change", (event) => choose(Number(event.target.value)));
    find("anchor").addEventListener("click", drop);
    find("ask").addEventListener("click", () => { const i = overlays().findIndex((o) => o.key === "similarity"); if (i >= 0 && !state.on.has(i)) toggle(i); ask(); });
    find("jump").addEventListener("click", jump);

    volumes.forEach((v, i) => {
      const option = document.createElement("option");
      option.value = i;
      option.textContent = v.title;
      find("volume").append(option);
      if (v.tissue) v.tissueTokens = bytes(v.tissue);
    });
    find("volume-pane").hidden = volumes.length < 2;
    find("similar-pane").hidden = !volumes.some((v) => v.features);
    find("opacity-pane").hidden = !volumes.some((v) => v.features || v.overlays.length);
    let room = 0;
    new ResizeObserver(() => { if (root.clientWidth !== room) { room = root.clientWidth; layout(); } }).observe(root);
    choose(0);
    if (root.dataset.alone) root.focus({ preventScroll: true });
    root.dataset.started = "yes";
  }

  for (const root of document.querySelectorAll("[data-viewer]"))
    start(root, JSON.parse(document.getElementById(root.dataset.viewer).textContent));
})();
