// Scrubs through OCT volumes: B-scan and view from the front with one cursor, overlays, distances. No dependencies, no network.
"use strict";
(() => {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const int16 = (text) => new Int16Array(bytes(text).buffer);
  const float32 = (text) => new Float32Array(bytes(text).buffer);
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const mm = (value) => `${value.toFixed(3)} mm`;
  const EMPTY = -32768, NONE = 255, LINE_STEPS = 16;

  // ---- tokens: what lies where ----

  // Token slice of a displayed B-scan, or -1.
  function tokenSlice(volume, bscan) {
    const [from, to] = volume.placement.bscans;
    const at = Math.floor((bscan + 0.5 - from) / (to - from) * volume.grid[0]);
    return at >= 0 && at < volume.grid[0] ? at : -1;
  }

  // Flat token index under a voxel, or -1.
  function tokenAt(volume, bscan, row, column) {
    if (!volume.placement) return -1;
    const [, h, w] = volume.grid, [left, right] = volume.placement.columns, [top, bottom] = volume.placement.rows[bscan];
    const d = tokenSlice(volume, bscan);
    const y = Math.floor((row + 0.5 - top) / (bottom - top) * h), x = Math.floor((column + 0.5 - left) / (right - left) * w);
    return d < 0 || y < 0 || y >= h || x < 0 || x >= w ? -1 : (d * h + y) * w + x;
  }

  // Middle voxel of a token: [B-scan, row, column].
  function voxelOf(volume, token) {
    const [d, h, w] = volume.grid, z = Math.floor(token / (h * w)), y = Math.floor(token / w) % h, x = token % w;
    const [from, to] = volume.placement.bscans, [left, right] = volume.placement.columns;
    const bscan = clamp(Math.floor(from + (z + 0.5) / d * (to - from)), 0, volume.shape[0] - 1), [top, bottom] = volume.placement.rows[bscan];
    return [bscan, Math.floor(top + (y + 0.5) / h * (bottom - top)), Math.floor(left + (x + 0.5) / w * (right - left))];
  }

  // RGBA of every token, and values to read out.
  function decodeTokens(overlay, count, maps) {
    if (overlay.rgba) return;
    overlay.rgba = new Uint8ClampedArray(4 * count);
    if (overlay.kind === "colours") {
      overlay.rgba.set(bytes(overlay.data));
    } else if (overlay.kind === "classes") {
      overlay.classes = bytes(overlay.data);
      overlay.classes.forEach((place, i) => place !== NONE && overlay.rgba.set([...overlay.legend[place].colour, 255], 4 * i));
    } else {
      overlay.values = overlay.data ? float32(overlay.data) : overlay.values;
      paint(overlay, maps);
    }
  }

  function paint(overlay, maps) {
    const stops = maps[overlay.low < 0 && overlay.key !== "similarity" ? "diverging" : "sequential"];
    const low = overlay.key === "similarity" ? 0 : overlay.low, span = overlay.high - low || 1;
    overlay.values.forEach((value, i) => {
      if (Number.isNaN(value)) { overlay.rgba[4 * i + 3] = 0; return; }
      const share = clamp((value - low) / span, 0, 1);
      overlay.rgba.set([...stops[Math.round(share * (stops.length - 1))], overlay.key === "similarity" && value <= 0 ? 0 : 255], 4 * i);
    });
    overlay.slices = {};
    overlay.front = null;
  }

  function canvasOf(width, height, rgba) {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
    return canvas;
  }

  function sliceCanvas(overlay, volume, d) {
    overlay.slices ||= {};
    const [, h, w] = volume.grid;
    overlay.slices[d] ||= canvasOf(w, h, overlay.rgba.slice(4 * d * h * w, 4 * (d + 1) * h * w));
    return overlay.slices[d];
  }

  // Seen from the front: the mean colour of the tokens of a column that have one.
  function frontCanvas(overlay, volume) {
    if (overlay.front) return overlay.front;
    const [d, h, w] = volume.grid, rgba = new Uint8ClampedArray(4 * d * w);
    for (let z = 0; z < d; z++) for (let x = 0; x < w; x++) {
      const sum = [0, 0, 0];
      let count = 0;
      for (let y = 0; y < h; y++) {
        const i = 4 * ((z * h + y) * w + x);
        if (!overlay.rgba[i + 3]) continue;
        for (let c = 0; c < 3; c++) sum[c] += overlay.rgba[i + c];
        count++;
      }
      if (count) rgba.set([...sum.map((s) => s / count), 255], 4 * (z * w + x));
    }
    overlay.front = canvasOf(w, d, rgba);
    return overlay.front;
  }

  // ---- one viewer on the page ----

  function start(root, data) {
    const find = (name) => root.querySelector(`[data-part="${name}"]`);
    const bscanCanvas = find("bscan"), frontCanvasElement = find("enface"), slider = find("slider");
    const state = { volume: 0, kept: 0, row: 0, column: 0, on: new Set(), opacity: 0.5, stretch: 1, cursor: true, anchor: null, query: null };
    const volumes = data.volumes;
    let volume, images = {}, drawn = -1, wheel = 0, spoken = 0;

    const bscan = () => volume.kept[state.kept];
    const overlays = () => volume.overlays;

    function choose(index) {
      const before = volume && [state.kept / Math.max(1, volume.kept.length - 1), state.row / volume.shape[1], state.column / volume.shape[2]];
      const names = new Set([...state.on].map((i) => overlays()[i].key));
      state.volume = index;
      volume = volumes[index];
      images = volume.pictures ||= {};
      if (volume.features && !overlays().some((o) => o.key === "similarity"))
        overlays().push({ key: "similarity", name: "Similarity to a clicked token", kind: "scalar", about: volume.aboutFeatures, unit: "", low: 0, high: 1,
          values: new Float32Array(volume.grid[0] * volume.grid[1] * volume.grid[2]).fill(NaN) });
      state.on = new Set(overlays().flatMap((o, i) => names.has(o.key) ? [i] : []));
      const at = before || [0.5, 0.5, 0.5];
      state.kept = Math.round(at[0] * (volume.kept.length - 1));
      state.row = clamp(Math.floor(at[1] * volume.shape[1]), 0, volume.shape[1] - 1);
      state.column = clamp(Math.floor(at[2] * volume.shape[2]), 0, volume.shape[2] - 1);
      state.anchor = null;
      slider.max = volume.kept.length - 1;
      find("volume").value = index;
      find("front-pane").hidden = !volume.front;
      find("note").textContent = volume.note;
      find("eye").textContent = volume.eye;
      listOverlays();
      if (state.query) compare();
      layout();
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
          const swatch = document.createElement("span");
          swatch.className = "swatch";
          swatch.style.background = `rgb(${entry.colour})`;
          label.append(" ", swatch, ` ${entry.name}`);
        }
        if (overlay.kind === "scalar") label.append(" ", scale(overlay));
        list.append(label);
      });
      find("overlays-pane").hidden = !overlays().length;
    }

    // What its colours stand for.
    function scale(overlay) {
      const two = overlay.low < 0, stops = data.colourMaps[two ? "diverging" : "sequential"], bar = document.createElement("span");
      bar.className = "scale";
      bar.style.background = `linear-gradient(to right, ${stops.filter((_, i) => i % 7 === 0).map((c) => `rgb(${c})`).join(", ")})`;
      const around = document.createElement("span");
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
      const [D, H, W] = volume.shape, [dz, dy, dx] = volume.shownMm;
      const fit = (canvas, width, height) => {
        const room = canvas.parentElement.clientWidth;
        if (!room) return;
        const shown = Math.min(room, 0.8 * window.innerHeight * width / height), dpr = window.devicePixelRatio || 1;
        canvas.style.width = `${shown}px`;
        canvas.style.height = `${shown * height / width}px`;
        canvas.width = Math.max(1, Math.round(shown * dpr));
        canvas.height = Math.max(1, Math.round(shown * height / width * dpr));
      };
      fit(bscanCanvas, W * dx, H * dy * state.stretch);
      if (volume.front) fit(frontCanvasElement, W * dx, D * dz);
      draw();
    }

    function draw() {
      drawBscan();
      if (volume.front) drawFront();
      slider.value = state.kept;
      slider.setAttribute("aria-valuetext", `B-scan ${bscan() + 1} of ${volume.shape[0]}`);
      find("number").textContent = `${bscan() + 1} of ${volume.shape[0]}`;
      find("readout").textContent = readout();
      const about = [...state.on].sort().map((i) => overlays()[i]).filter((o) => o.about).map((o) => `${o.name}: ${o.about}`);
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

    function place(context, source, x0, x1, y0, y1) {
      context.save();
      context.translate(x0, y0);
      context.scale(Math.sign(x1 - x0) || 1, Math.sign(y1 - y0) || 1);
      context.drawImage(source, 0, 0, Math.abs(x1 - x0), Math.abs(y1 - y0));
      context.restore();
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
        if (overlay.kind === "lines") drawLines(context, overlay, width, height);
        else if (overlay.kind === "voxels") drawArea(context, overlay, width, height);
        else {
          const d = tokenSlice(volume, k);
          if (d < 0) continue;
          decodeTokens(overlay, volume.grid[0] * volume.grid[1] * volume.grid[2], data.colourMaps);
          const [left, right] = volume.placement.columns, [top, bottom] = volume.placement.rows[k];
          context.globalAlpha = state.opacity;
          context.imageSmoothingEnabled = false;
          place(context, sliceCanvas(overlay, volume, d), left / W * width, right / W * width, top / H * height, bottom / H * height);
          context.globalAlpha = 1;
        }
      }
      drawSides(context, width, height, volume.sides);
      drawBars(context, width, height, volume.shownMm[2] * W, volume.shownMm[1] * H);
      if (state.cursor) cross(context, (state.column + 0.5) / W * width, (state.row + 0.5) / H * height, width, height);
      if (state.anchor) mark(context, (state.anchor[2] + 0.5) / W * width, (state.anchor[1] + 0.5) / H * height, state.anchor[0] === k);
    }

    function drawLines(context, overlay, width, height) {
      overlay.rows ||= int16(overlay.data);
      const [, H] = volume.shape, count = overlay.columns, kept = volume.kept.length;
      overlay.legend.forEach((entry, s) => {
        context.strokeStyle = `rgb(${entry.colour})`;
        context.lineWidth = Math.max(1.2, width / 500);
        context.beginPath();
        let pen = false;
        for (let x = 0; x < count; x++) {
          const row = overlay.rows[(s * kept + state.kept) * count + x];
          if (row === EMPTY) { pen = false; continue; }
          const px = (x + 0.5) / count * width, py = (row / LINE_STEPS + 0.5) / H * height;
          pen ? context.lineTo(px, py) : context.moveTo(px, py);
          pen = true;
        }
        context.stroke();
      });
    }

    function drawArea(context, overlay, width, height) {
      overlay.images ||= {};
      const k = state.kept;
      if (!overlay.data[k]) return;
      if (!overlay.images[k]) {
        const image = new Image();
        image.addEventListener("load", () => { image.ready = true; if (k === state.kept) draw(); });
        image.src = `data:image/png;base64,${overlay.data[k]}`;
        overlay.images[k] = image;
      }
      if (!overlay.images[k].ready) return;
      context.globalAlpha = state.opacity;
      context.imageSmoothingEnabled = false;
      context.drawImage(overlay.images[k], 0, 0, width, height);
      context.globalAlpha = 1;
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
      drawBars(context, width, height, volume.shownMm[2] * W, 0);
      const x = (state.column + 0.5) / W * width, y = (bscan() + 0.5) / D * height;
      if (state.cursor) cross(context, x, y, width, height);
      if (state.anchor) mark(context, (state.anchor[2] + 0.5) / W * width, (state.anchor[0] + 0.5) / D * height, true);
    }

    function cross(context, x, y, width, height) {
      context.lineWidth = Math.max(1, width / 700);
      for (const [colour, shift] of [["rgba(0,0,0,.6)", context.lineWidth], ["rgba(255,235,120,.9)", 0]]) {
        context.strokeStyle = colour;
        context.beginPath();
        context.moveTo(x + shift, 0); context.lineTo(x + shift, height);
        context.moveTo(0, y + shift); context.lineTo(width, y + shift);
        context.stroke();
      }
    }

    function mark(context, x, y, here) {
      const r = 6 * (window.devicePixelRatio || 1);
      context.strokeStyle = "#fff";
      context.lineWidth = 2;
      context.setLineDash(here ? [] : [3, 3]);
      context.beginPath();
      context.arc(x, y, r, 0, 2 * Math.PI);
      context.stroke();
      context.setLineDash([]);
    }

    function write(context, text, x, y, align, base) {
      context.font = `${13 * (window.devicePixelRatio || 1)}px system-ui, sans-serif`;
      context.textAlign = align;
      context.textBaseline = base;
      context.lineWidth = 3;
      context.strokeStyle = "rgba(0,0,0,.8)";
      context.strokeText(text, x, y);
      context.fillStyle = "#fff";
      context.fillText(text, x, y);
    }

    function drawSides(context, width, height, sides, vertical) {
      const pad = 6 * (window.devicePixelRatio || 1);
      if (sides) {
        write(context, sides[0], pad, height / 2, "left", "middle");
        write(context, sides[1], width - pad, height / 2, "right", "middle");
      }
      if (vertical) {
        write(context, vertical[0], width / 2, pad, "center", "top");
        write(context, vertical[1], width / 2, height - pad, "center", "bottom");
      }
    }

    // A millimetre across, and 0.2 mm down where the two scales differ.
    function drawBars(context, width, height, wide, deep) {
      if (!volume.hasMm) return;
      const pad = 10 * (window.devicePixelRatio || 1), across = wide > 2 ? 1 : 0.2, length = across / wide * width, y = height - pad;
      context.fillStyle = "#fff";
      context.fillRect(pad, y - 2, length, 3);
      write(context, `${across} mm`, pad, y - 5, "left", "bottom");
      if (deep && state.stretch !== 1) {
        const down = 0.2 / deep * height;
        context.fillRect(pad, y - down, 3, down);
        write(context, "0.2 mm", pad + 8, y - down, "left", "middle");
      }
    }

    // ---- words ----

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

    function step(by) { state.kept = clamp(state.kept + by, 0, volume.kept.length - 1); draw(); }
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
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT" || event.target === find("opacity")) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      const action = /^[1-9]$/.test(key) ? () => toggle(Number(key) - 1) : keys[key];
      if (!action) return;
      event.preventDefault();
      action(event);
    });

    function drag(canvas, take) {
      canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); take(event, true); });
      canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) take(event, false); });
    }
    const at = (canvas, event, rows, columns) => {
      const box = canvas.getBoundingClientRect();
      return [Math.floor(clamp((event.clientY - box.top) / box.height, 0, 0.999999) * rows), Math.floor(clamp((event.clientX - box.left) / box.width, 0, 0.999999) * columns)];
    };
    drag(bscanCanvas, (event, down) => {
      [state.row, state.column] = at(bscanCanvas, event, volume.shape[1], volume.shape[2]);
      if (down && [...state.on].some((i) => overlays()[i].key === "similarity")) ask();
      draw();
    });
    drag(frontCanvasElement, (event) => {
      const [k, column] = at(frontCanvasElement, event, volume.shape[0], volume.shape[2]);
      state.kept = nearestKept(k);
      state.column = column;
      draw();
    });
    for (const canvas of [bscanCanvas, frontCanvasElement])
      canvas.addEventListener("wheel", (event) => {
        // Without the focus the wheel belongs to the page: nobody wants to be caught while scrolling.
        if (event.ctrlKey || !root.contains(document.activeElement)) return;
        event.preventDefault();
        wheel += event.deltaMode ? 40 * event.deltaY : event.deltaY;
        const steps = Math.trunc(wheel / 40);
        if (steps) { wheel -= 40 * steps; step(steps); }
      }, { passive: false });

    slider.addEventListener("input", () => { state.kept = Number(slider.value); draw(); });
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
